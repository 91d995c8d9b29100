"""`moerelay generate` against a router over real HTTP."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import AuthenticationError, ConfigError, InvalidRequestError, UnavailableError, WorkerLostError
from deploy.arguments import first_key
from deploy.client import ClusterClient
from deploy.generate import generate
from tests.fakes.arithmetic_model import ArithmeticRouter, reply_to
from tests.ports import reserved_address


async def output_of(router: ArithmeticRouter, prompt: str | list[int], **sampling: Any) -> list[str]:
    file = io.StringIO()
    async with router.running() as url:
        assert await generate(ClusterClient(url), prompt, sampling, None, Console(file=file, width=60)) == 0
    return file.getvalue().splitlines()


async def test_tokens_then_shape_then_one_line_per_layer() -> None:
    tokens, counts, shape, *layers = await output_of(ArithmeticRouter(64), [5, 6, 7], max_tokens=4)
    assert tokens.split() == [str(i) for i in reply_to([5, 6, 7], 4, 0, False).token_ids]
    assert counts == "3 prompt tokens + 4 generated, finish_reason length"
    assert shape == "routed_experts: shape (6, 2, 2) (positions, layers, experts per token), uint8"
    assert [line.split("|")[0] for line in layers] == ["layer   0 ", "layer   1 "]


async def test_nothing_is_coloured_in_a_file() -> None:
    assert not any("\x1b" in line for line in await output_of(ArithmeticRouter(64), [1], max_tokens=2))


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    router = ArithmeticRouter(64)
    router.break_after = 2
    with pytest.raises(WorkerLostError, match="ended without"):
        await output_of(router, [1], max_tokens=4)


async def test_the_servers_refusal_keeps_its_class_and_field() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await output_of(ArithmeticRouter(64), [999], max_tokens=1)
    assert caught.value.param == "token_ids"


async def test_the_first_key_of_the_file_goes_with_every_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# of the trainer\n\nfirst-key\nsecond-key\n")
    router = ArithmeticRouter(64)
    router.api_key = "first-key"
    file = io.StringIO()
    async with router.running() as url:
        client = ClusterClient(url, api_key=first_key(keys))
        assert await generate(client, [1], {"max_tokens": 2}, None, Console(file=file)) == 0
    assert "2 generated" in file.getvalue()


async def test_a_missing_key_is_asked_for_by_its_flag_and_a_wrong_one_is_the_servers_sentence() -> None:
    router = ArithmeticRouter(64)
    router.api_key = "first-key"
    with pytest.raises(AuthenticationError, match=r"asks for a key; name the file that has it in --api-key-file$"):
        await output_of(router, [1], max_tokens=2)
    async with router.running() as url:
        client = ClusterClient(url, api_key="another")
        with pytest.raises(AuthenticationError, match="which key"):
            await generate(client, [1], {"max_tokens": 2}, None, Console(file=io.StringIO()))


async def test_a_port_that_hangs_up_may_want_https() -> None:
    """As one for TLS does when it gets plain HTTP."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with ClusterClient(url) as client:
            with pytest.raises(WorkerLostError, match=r"broke off: Server disconnected; is it meant to be https://\?$"):
                await client.get("/cluster")


async def test_text_without_a_tokenizer_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--token-ids"):
        await output_of(ArithmeticRouter(64), "hello", max_tokens=1)


async def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with (
        reserved_address() as address,
        pytest.raises(UnavailableError, match=f"nothing answers at http://{address}"),
    ):
        await generate(ClusterClient(f"http://{address}"), [1], {}, None, Console(file=io.StringIO()))
