"""The SGLang dialect over fake workers, read as SGLang's clients read it."""

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64
import pytest

from common.errors import WorkerLostError
from router.sglang.response_schemas import SglangOutput
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import Cluster, running, split_events, strict_json

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110]
LAYERS, TOP_K = 2, 2


def int32_rows(output: dict[str, Any], num_rows: int) -> npt.NDArray[np.int32]:
    """As slime: the base64 of a flat int32 array that must have exactly the elements it is reshaped to."""
    data = pybase64.b64decode(output["meta_info"]["routed_experts"].encode("ascii"), validate=True)
    return np.frombuffer(data, dtype=np.int32).reshape(num_rows, LAYERS, TOP_K)


def expected_int32(first: int, end: int) -> npt.NDArray[np.generic]:
    return expected_rows(first, end, description()).astype(np.int32)


async def post(cluster: Cluster, **body: Any) -> Any:
    """A whole answer."""
    answer: Any
    status, answer = await cluster.post(body, "/generate")
    assert status == 200, answer
    for output in answer if isinstance(answer, list) else [answer]:
        SglangOutput.model_validate(output)
    return answer


async def stream(cluster: Cluster, **body: Any) -> list[dict[str, Any]]:
    """The events of a complete stream."""
    async with cluster.http.post("/generate", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = split_events(await response.read())
    assert events[-1] == b"[DONE]"
    parsed = [strict_json(event.decode()) for event in events[:-1]]
    for event in parsed:
        SglangOutput.model_validate(event)
    return parsed


async def refused(cluster: Cluster, body: Any, path: str = "/generate") -> tuple[int, str, str]:
    status, answer = await cluster.post(body, path)
    assert set(answer) == {"error"}
    return status, answer["error"]["param"], answer["error"]["message"]


async def test_a_whole_answer() -> None:
    async with running() as cluster:
        answer = await post(
            cluster,
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 3},
            return_routed_experts=True,
            return_logprob=True,
            rid="mine",
        )
    latency = answer["meta_info"].pop("e2e_latency")
    rows = answer["meta_info"].pop("routed_experts")
    assert 0 < latency < 60
    assert answer == {
        # Without a tokenizer there is no text.
        "text": "",
        # 605 % 300 = 5, then 7 more each time
        "output_ids": [5, 12, 19],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "weight_version": "7",
            "weight_versions": [{"version": "7", "start": 0, "end": 3}],
            "output_token_logprobs": [[-0.5, 5, None], [-0.5, 12, None], [-0.5, 19, None]],
            "input_token_logprobs": [],
            "routed_experts_start_len": 0,
        },
    }
    assert len(pybase64.b64decode(rows, validate=True)) == (10 + 3 - 1) * LAYERS * TOP_K * 4


@pytest.mark.parametrize("start", [0, 1, 9, 10])
async def test_rows_are_flat_int32_from_the_start(start: int) -> None:
    body = {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": start}
    async with running(Script(prompt_chunk=3)) as cluster:
        whole = await post(cluster, sampling_params={"max_new_tokens": 4}, **body)
        events = await stream(cluster, sampling_params={"max_new_tokens": 4}, **body)
        one_token = await post(cluster, sampling_params={"max_new_tokens": 1}, **body)
    for output in (whole, events[-1]):
        np.testing.assert_array_equal(int32_rows(output, 13 - start), expected_int32(start, 13))
        assert output["meta_info"]["routed_experts_start_len"] == start
    assert int32_rows(one_token, 10 - start).size == (10 - start) * LAYERS * TOP_K


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, "uint8"), (512, "uint16")])
async def test_rows_are_int32_whatever_the_model(num_experts: int, dtype: str) -> None:
    model = description(num_experts=num_experts, routing_dtype=dtype)
    async with running(Script(model)) as cluster:
        answer = await post(
            cluster, input_ids=list(range(3, 90)), return_routed_experts=True, sampling_params={"max_new_tokens": 2}
        )
    np.testing.assert_array_equal(int32_rows(answer, 88), expected_rows(0, 88, model))


async def test_no_rows_unless_they_are_asked_for() -> None:
    """Clients ask whether the key is there: it must not be there with a null."""
    async with running() as cluster:
        for body in ({}, {"return_routed_experts": False}, {"return_routed_experts": None}):
            answer = await post(cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, **body)
            assert not {"routed_experts", "routed_experts_start_len", "output_token_logprobs"} & set(
                answer["meta_info"]
            )
        assert [r.routing.enabled for r in cluster.decode[0].decode_requests] == [False] * 3
    off = Script(description(routing_enabled=False))
    async with running(off, enable_return_routed_experts=False) as cluster:
        answer = await post(
            cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, return_routed_experts=True
        )
        assert "routed_experts" not in answer["meta_info"]


async def test_events_are_cumulative_and_rows_come_last() -> None:
    async with running(Script(chunk_tokens=2)) as cluster:
        events = await stream(
            cluster,
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 5},
            return_logprob=True,
            logprob_start_len=8,
            return_routed_experts=True,
        )
    tokens = expected_tokens(PROMPT, 5)
    assert [event["output_ids"] for event in events] == [tokens[:2], tokens[:4], tokens]
    for event in events:
        meta = event["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
        assert meta["completion_tokens"] == len(event["output_ids"])
        assert "index" not in event
    assert [event["meta_info"]["finish_reason"] for event in events] == [None, None, {"type": "length", "length": 5}]
    assert ["routed_experts" in event["meta_info"] for event in events] == [False, False, True]
    assert ["input_token_logprobs" in event["meta_info"] for event in events] == [False, False, True]
    assert events[-1]["meta_info"]["input_token_logprobs"] == [[None, 99, None], [-9 / 8, 110, None]]
    np.testing.assert_array_equal(int32_rows(events[-1], 14), expected_int32(0, 14))


async def test_prompt_and_top_logprobs() -> None:
    """As in SGLang, the first entry of the prompt has no logprob, wherever the prompt's logprobs start."""
    body = {"input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    async with running() as cluster:
        everything = await post(cluster, **body, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
        tail = await post(cluster, **body, return_logprob=True, logprob_start_len=1)
        none = await post(cluster, **body, return_logprob=True, logprob_start_len=3)
        unasked = await post(cluster, **body, logprob_start_len=0, top_logprobs_num=2)
        sampling = cluster.decode[0].decode_requests[-1].sampling
        assert not sampling.HasField("logprobs")
        assert not sampling.HasField("prompt_logprobs")
    meta = everything["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 7, None], [-1 / 8, 8, None], [-2 / 8, 9, None]]
    assert meta["input_top_logprobs"] == [
        None,
        [[-1 / 8, 0, None], [-2 / 8, 1, None]],
        [[-2 / 8, 0, None], [-3 / 8, 1, None]],
    ]
    assert meta["output_top_logprobs"] == [[[-0.25, 0, None], [-0.25, 1, None]]] * 2
    assert tail["meta_info"]["input_token_logprobs"] == [[None, 8, None], [-2 / 8, 9, None]]
    assert none["meta_info"]["input_token_logprobs"] == []
    assert "input_top_logprobs" not in tail["meta_info"]
    assert "input_token_logprobs" not in unasked["meta_info"]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
async def test_logprobs_that_are_not_finite(logprob: float) -> None:
    async with running(Script(logprob=logprob)) as cluster:
        answer = await post(cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, return_logprob=True)
    assert answer["meta_info"]["output_token_logprobs"] == [[-9999.0, 5, None]]


async def test_finish_reasons() -> None:
    async with running() as cluster:
        by_eos = await post(cluster, input_ids=[1, 1], sampling_params={"max_new_tokens": 9})
        by_stop = await post(cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 9, "stop_token_ids": [19]})
    # An end-of-sequence id counts as matched, too.
    assert (by_eos["output_ids"], by_eos["meta_info"]["finish_reason"]) == ([2], {"type": "stop", "matched": 2})
    assert by_stop["output_ids"] == [5, 12, 19]
    assert by_stop["meta_info"]["finish_reason"] == {"type": "stop", "matched": 19}


async def test_a_batch_answers_a_list() -> None:
    prompts = [[3, 4], [5, 6, 7]]
    async with running() as cluster:
        one = await post(cluster, input_ids=[[3, 4]], sampling_params={"max_new_tokens": 2})
        assert [output["output_ids"] for output in one] == [expected_tokens([3, 4], 2)]
        several = await post(
            cluster,
            input_ids=prompts,
            sampling_params={"max_new_tokens": 3, "n": 2},
            return_routed_experts=True,
            return_logprob=[True, True],
            rid="batch",
        )
        choices = await post(cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 2, "n": 2})
        named = await post(
            cluster, input_ids=prompts, sampling_params=[{"max_new_tokens": 1}] * 2, rid=["first", "second"]
        )
    assert [output["meta_info"]["id"] for output in several] == ["batch_0", "batch_1", "batch_2", "batch_3"]
    for index, output in enumerate(several):
        prompt, choice = prompts[index // 2], index % 2
        assert output["output_ids"] == expected_tokens(prompt, 3, choice)
        assert output["meta_info"]["prompt_tokens"] == len(prompt)
        np.testing.assert_array_equal(int32_rows(output, len(prompt) + 2), expected_int32(0, len(prompt) + 2))
        assert [entry[1] for entry in output["meta_info"]["output_token_logprobs"]] == output["output_ids"]
    assert [output["output_ids"] for output in choices] == [expected_tokens(PROMPT, 2, choice) for choice in (0, 1)]
    assert [output["meta_info"]["id"] for output in named] == ["first", "second"]


async def test_a_streamed_batch_says_whose_event_it_is() -> None:
    prompts = [[3, 4], [5, 6, 7]]
    async with running() as cluster:
        events = await stream(
            cluster, input_ids=prompts, sampling_params={"max_new_tokens": 3, "n": 2}, return_routed_experts=True
        )
    for index in range(4):
        own = [event for event in events if event["index"] == index]
        prompt = prompts[index // 2]
        assert own[-1]["output_ids"] == expected_tokens(prompt, 3, index % 2)
        assert [event["meta_info"]["finish_reason"] is None for event in own] == [True, True, False]
        np.testing.assert_array_equal(int32_rows(own[-1], len(prompt) + 2), expected_int32(0, len(prompt) + 2))


async def test_every_sampling_field_reaches_the_workers() -> None:
    fields: dict[str, Any] = {
        "max_new_tokens": 4,
        "min_new_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "sampling_seed": -(2**63),
        "stop_token_ids": [7, 4],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"299": -100},
        # Sent by slime with every request.
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    async with running() as cluster:
        await post(cluster, input_ids=PROMPT, sampling_params=fields, priority=3, extra_key="pepper")
        await post(cluster, input_ids=PROMPT, sampling_params={"max_new_tokens": 1, "top_k": -1}, cache_salt="salt")
        given, plain = cluster.decode[0].decode_requests
    sampling = given.sampling
    assert list(given.token_ids) == PROMPT
    # SGLang: higher is sooner; the workers: lower is sooner.
    assert given.priority == -3
    assert (given.cache_salt, plain.cache_salt) == ("pepper", "salt")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (4, 3, -(2**63))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 5, 0.125)
    assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([4, 7], True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(sampling.logit_bias) == {299: -100.0}
    assert (plain.sampling.temperature, plain.sampling.top_k) == (1, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_ids"),
        ({"input_ids": PROMPT, "text": "a"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": "1"}, "input_ids"),
        ({"input_ids": [5] * 128}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        # There is no tokenizer.
        ({"text": "hello"}, "text"),
        ({"input_ids": [1], "routed_experts_start_len": 2}, "routed_experts_start_len"),
        ({"input_ids": [1], "routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"input_ids": [1], "routed_experts_start_len": 2**127}, "routed_experts_start_len"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 2**31}, "top_logprobs_num"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"input_ids": [1], "token_ids_logprob": [3]}, "token_ids_logprob"),
        ({"input_ids": [1], "image_data": "x"}, "image_data"),
        ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states"),
        ({"input_ids": [1], "rid": ["a"]}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid"),
        ({"input_ids": [1], "rid": "two words"}, "rid"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"top_k": 1}, {"top_k": 2}]}, "sampling_params"),
        ({"input_ids": [[1], [2]], "return_logprob": [True, False]}, "return_logprob"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**63}}, "sampling_seed"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"n": 129}}, "n"),
        ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "x"}}, "stop_regex"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"300": 1}}}, "logit_bias"),
        ({"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": "b"}}, "json_schema"),
    ],
)
async def test_refusals_use_sglangs_names(body: dict[str, Any], param: str) -> None:
    async with running() as cluster:
        status, named, message = await refused(cluster, body)
        assert (status, named) == (400, param), message
        assert param in message or param == "input_ids"
        assert cluster.decode[0].decode_requests == []


async def test_an_explicit_null_means_absent() -> None:
    nulls = dict.fromkeys(("text", "rid", "stream", "return_logprob", "logprob_start_len", "token_ids_logprob"))
    async with running() as cluster:
        sampling = {"max_new_tokens": 1, "temperature": None, "stop": None, "n": None}
        answer = await post(cluster, input_ids=PROMPT, sampling_params=sampling, **nulls)
        assert answer["output_ids"] == [5]
        whole_context = await post(cluster, input_ids=PROMPT * 12)
        assert len(whole_context["output_ids"]) == 8


async def test_the_header_names_the_request() -> None:
    async with running() as cluster:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "rid": "body"}
        async with cluster.http.post("/generate", json=body, headers={"X-Request-Id": "header"}) as response:
            assert response.headers["X-Request-Id"] == "header"
            assert (await response.json())["meta_info"]["id"] == "header"


async def test_a_lost_worker_ends_a_stream_without_done() -> None:
    script = Script(break_after=2, decode_error=WorkerLostError("gone"))
    async with running(script) as cluster:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9}, "stream": True}
        status, _ = await cluster.post(body | {"stream": False}, "/generate")
        async with cluster.http.post("/generate", json=body) as response:
            events = split_events(await response.read())
    assert strict_json(events[-1].decode())["error"]["message"]
    assert [strict_json(event.decode())["meta_info"]["finish_reason"] for event in events[:-1]] == [None, None]
    assert status in (502, 503)


ABORT = "/abort_request"


async def test_abort_keeps_what_is_there() -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 10},
        "return_logprob": True,
        "return_routed_experts": True,
        "rid": "mine",
    }
    for streamed in (False, True):
        async with running(Script(hold_after=4)) as cluster:
            decode = cluster.decode[0]
            request = asyncio.ensure_future(stream(cluster, **body) if streamed else post(cluster, **body))
            await decode.wait_until(lambda: decode.num_chunks == 4)  # noqa: B023
            assert await cluster.post({"rid": "mine"}, ABORT) == (200, {"aborted": ["mine"]})
            answer = await request
        output = answer[-1] if streamed else answer
        meta = output["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted"}
        assert output["output_ids"] == expected_tokens([5, 6, 7], 4)
        assert [entry[1] for entry in meta["output_token_logprobs"]] == output["output_ids"]
        np.testing.assert_array_equal(int32_rows(output, 6), expected_int32(0, 6))


async def test_abort_before_the_first_token_has_no_rows() -> None:
    async with running(Script(hold_after=0)) as cluster:
        decode = cluster.decode[0]
        request = asyncio.ensure_future(
            post(cluster, input_ids=PROMPT, return_routed_experts=True, return_logprob=True)
        )
        await decode.wait_until(lambda: len(decode.live) == 1)
        status, answer = await cluster.post({"abort_all": True}, ABORT)
        assert (status, len(answer["aborted"])) == (200, 1)
        output = await request
    assert (output["output_ids"], output["meta_info"]["finish_reason"]["type"]) == ([], "abort")
    assert output["meta_info"]["id"] == answer["aborted"][0]
    assert output["meta_info"]["output_token_logprobs"] == []
    assert "routed_experts" not in output["meta_info"]


async def test_abort_of_one_choice_of_a_batch() -> None:
    prompts = [[3, 4], [5, 6, 7]]
    script = Script(hold_after=4)
    async with running(script) as cluster:
        decode = cluster.decode[0]
        request = asyncio.ensure_future(
            post(
                cluster,
                input_ids=prompts,
                sampling_params={"max_new_tokens": 6, "n": 2},
                return_routed_experts=True,
                rid="batch",
            )
        )
        await decode.wait_until(lambda: decode.num_chunks == 8)
        assert await cluster.post({"rid": "batch_3"}, ABORT) == (200, {"aborted": ["batch_3"]})
        script.release.set()
        answer = await request
    lengths = [len(output["output_ids"]) for output in answer]
    assert lengths == [6, 6, 6, 2]
    for index, output in enumerate(answer):
        prompt, num_rows = prompts[index // 2], len(prompts[index // 2]) + lengths[index] - 1
        assert output["meta_info"]["finish_reason"]["type"] == ("abort" if index == 3 else "length")
        assert output["output_ids"] == expected_tokens(prompt, lengths[index], index % 2)
        np.testing.assert_array_equal(int32_rows(output, num_rows), expected_int32(0, num_rows))


async def test_abort_of_a_whole_batch_and_by_listed_ids() -> None:
    script = Script(hold_after=2)
    async with running(script) as cluster:
        decode = cluster.decode[0]
        body = {"input_ids": [[3, 4], [5, 6, 7]], "sampling_params": {"max_new_tokens": 6}}
        request = asyncio.ensure_future(post(cluster, **body, rid="batch"))
        await decode.wait_until(lambda: decode.num_chunks == 4)
        assert (await cluster.post({"rid": "batch"}, ABORT))[0] == 200
        assert [output["meta_info"]["finish_reason"]["type"] for output in await request] == ["abort", "abort"]
        request = asyncio.ensure_future(post(cluster, **body, rid=["a", "b"]))
        await decode.wait_until(lambda: decode.num_chunks == 8)
        assert await refused(cluster, body | {"rid": ["c", "b"]}) == (
            409,
            "rid",
            "a live request has the id 'b' already",
        )
        assert (await cluster.post({"rid": "b"}, ABORT))[0] == 200
        script.release.set()
        assert [output["meta_info"]["finish_reason"]["type"] for output in await request] == ["length", "abort"]
        assert (await refused(cluster, {"rid": "b"}, ABORT))[:2] == (404, "rid")


async def test_abort_of_nothing() -> None:
    async with running() as cluster:
        assert await cluster.post({"abort_all": True}, ABORT) == (200, {"aborted": []})
        assert (await refused(cluster, {"rid": "nobody"}, ABORT))[:2] == (404, "rid")
        for body in ({}, {"rid": ""}, {"rid": None, "abort_all": False}, {"rid": 1}, {"abort_all": 1}):
            assert (await refused(cluster, body, ABORT))[0] == 400


async def test_the_id_of_a_live_choice_is_taken_for_every_endpoint() -> None:
    """Or /abort_request would end the wrong one of two."""
    async with running(Script(hold_after=1)) as cluster:
        batch = {"input_ids": [[5, 6], [7, 8]], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 9}}
        live = asyncio.ensure_future(cluster.post(batch, "/generate"))
        await cluster.decode[0].wait_until(lambda: len(cluster.decode[0].live) == 2)
        single = {"input_ids": [5, 6], "rid": "a", "sampling_params": {"max_new_tokens": 1}}
        assert (await cluster.post(single, "/generate"))[0] == 409
        assert (await cluster.post({"token_ids": [5, 6], "sampling_params": {}, "request_id": "b"}))[0] == 409
        cluster.decode[0].script.release.set()
        assert (await live)[0] == 200
        assert (await cluster.post(single, "/generate"))[0] == 200


async def test_a_second_request_with_a_live_id_is_refused() -> None:
    script = Script(hold_after=1)
    async with running(script) as cluster:
        decode = cluster.decode[0]
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "rid": "mine"}
        request = asyncio.ensure_future(post(cluster, **body))
        await decode.wait_until(lambda: decode.num_chunks == 1)
        assert (await refused(cluster, body))[:2] == (409, "rid")
        script.release.set()
        await request


async def test_health_generate_really_generates() -> None:
    script = Script()
    async with running(script) as cluster:
        assert await cluster.get("/health_generate") == (200, {"status": "ok"})
        (asked,) = cluster.decode[0].decode_requests
        assert (asked.sampling.max_tokens, asked.routing.enabled) == (1, False)
        script.break_after = 0
        status, answer = await cluster.get("/health_generate")
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
    async with running(prefill=0) as cluster:
        assert (await cluster.get("/health_generate"))[0] == 503


async def test_what_the_server_says_about_itself() -> None:
    async with running(served_model_name="tiny") as cluster:
        for path in ("/get_model_info", "/model_info"):
            _, info = await cluster.get(path)
            assert (info["is_generation"], info["weight_version"], info["model_type"]) == (True, "7", "qwen3_moe")
            assert (info["model_path"], info["tokenizer_path"]) == (None, None)
        for path in ("/get_server_info", "/server_info"):
            _, info = await cluster.get(path)
            assert (info["served_model_name"], info["context_length"], info["skip_tokenizer_init"]) == (
                "tiny",
                128,
                True,
            )
            assert info["enable_return_routed_experts"] is True
