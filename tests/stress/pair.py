"""A prefill engine and a decode engine on one model, the handoffs between them, and the weights that both use.

Everything happens in steps and commands that the caller chooses; after each of them both engines must be consistent.
"""

from dataclasses import dataclass, replace

from common.engine.request import EngineRequest, RequestId, Work
from common.kv.store import slots_of
from tests.stress.asks import Ask
from tests.stress.checks import check
from tests.stress.model import EngineShape, ModelRig, StressModel, label_of
from tests.stress.oracle import Oracle
from tests.stress.tally import Tally
from tests.unit.engine.rig import Transcript

#: Times in a row that nothing moves although everything may, before that counts as stuck: a lease, and then the
#: prompt's seat on the other side, come without a token being computed.
MAX_IDLE = 4


@dataclass
class Handoff:
    """One prompt on its way."""

    there: Transcript
    here: Transcript
    #: Positions that are on the decode side.
    sent: int

    @property
    def num_ready(self) -> int:
        """Positions that could be sent now."""
        return self.there.advances[-1].computed - self.sent if self.there.advances else 0

    @property
    def is_sent(self) -> bool:
        """Only the first tokens are missing."""
        return bool(self.there.first_tokens) and self.num_ready <= 0


class EnginePair:
    """Both engines.

    Attributes:
        handoffs: those under way, by request.
        version: of the weights in use.
        tally: what happened so far.
    """

    def __init__(self, model: StressModel, prefill: EngineShape, decode: EngineShape, block_size: int) -> None:
        self.prefill = ModelRig(model, prefill, block_size)
        self.decode = ModelRig(model, decode, block_size)
        self.handoffs: dict[RequestId, Handoff] = {}
        self.version = 0
        self.is_updating = False
        self.tally = Tally()
        self._model = model
        self._block_size = block_size
        self._asks: dict[RequestId, Ask] = {}
        self._unleased: set[RequestId] = set()

    def __str__(self) -> str:
        """Who is live, and where."""
        loads = [f"{name} {rig.core.load()}" for name, rig in (("prefill", self.prefill), ("decode", self.decode))]
        names = [f"{t.request.request_id} ({t.request.work.value})" for t in self.live()]
        return f"{', '.join(names)}; {'; '.join(loads)}; under way {sorted(self.handoffs)}"

    # --- requests

    def submit(self, request: EngineRequest, ask: Ask, rig: ModelRig) -> None:
        """To one of the engines; Work.DECODE to the decode engine, and when it has a lease, to the other one."""
        self.tally.requests += 1
        self.tally.choices += ask.sampling.n
        self._asks[request.request_id] = ask
        rig.submit(request)
        if request.work is Work.DECODE:
            self._unleased.add(request.request_id)
        self._check()

    def rig_of(self, transcript: Transcript) -> ModelRig:
        """The engine that tells its client."""
        name = transcript.request.request_id
        return self.decode if self.decode.transcripts.get(name) is transcript else self.prefill

    def live(self) -> list[Transcript]:
        """What clients wait for."""
        return [
            transcript
            for rig in (self.prefill, self.decode)
            for name, transcript in rig.transcripts.items()
            if transcript.request.work is not Work.PREFILL and not transcript.request_ended and name not in rig.silenced
        ]

    def cancel(self, transcript: Transcript) -> None:
        """The client is gone, or the handoff broke: both sides let go without a word."""
        self.tally.cancellations += 1
        self.rig_of(transcript).cancel(transcript.request.request_id)
        self._unleased.discard(transcript.request.request_id)
        self._drop_handoff(transcript.request.request_id)
        self._check()

    def abort(self, transcript: Transcript, choice: int | None = None) -> None:
        """Ends one choice, or all."""
        self.tally.aborts += 1
        rig = self.rig_of(transcript)
        rig.core.abort(transcript.request.request_id, choice)
        self._deliver()
        self._check()

    # --- steps

    def step(self, rig: ModelRig) -> bool:
        """One step of one engine, which checks itself afterwards."""
        moved = rig.step()
        self._deliver()
        return moved

    def carry(self, name: RequestId, most: int) -> bool:
        """Moves up to `most` positions of a handoff, or its first tokens when everything else is there."""
        handoff = self.handoffs[name]
        if handoff.num_ready > 0:
            self._copy(handoff, handoff.sent + min(most, handoff.num_ready))
            self.decode.core.advance_handoff(name, handoff.sent)
        elif handoff.is_sent:
            self.decode.core.commit_handoff(name, handoff.there.first_tokens, handoff.there.num_cached)
            self.tally.handoffs += 1
            self._drop_handoff(name)
        else:
            return False
        self._deliver()
        self._check()
        return True

    def run(self) -> None:
        """Everything that can happen without another command, until nobody is live.

        Raises:
            AssertionError: nothing moves any more.
        """
        num_idle = 0
        while self.live() or self.is_updating:
            moved = [self.step(rig) for rig in (self.prefill, self.decode)]
            moved += [self.carry(name, 1000) for name in list(self.handoffs) if name in self.handoffs]
            num_idle = 0 if self.try_update() or any(moved) else num_idle + 1
            assert num_idle < MAX_IDLE, f"stuck: {self}"

    def _copy(self, handoff: Handoff, end: int) -> None:
        """KV, and rows if they are wanted, of the next positions: from one engine's slots to the other's."""
        there, here = handoff.there.blocks, handoff.here.blocks
        assert there is not None
        assert here is not None
        source, target = self.prefill.store, self.decode.store
        from_slots = slots_of(there, handoff.sent, end, self._block_size)
        to_slots = slots_of(here, handoff.sent, end, self._block_size)
        target.write_kv(to_slots, source.read_kv(from_slots))
        if handoff.here.request.routing_start is not None:
            target.write_rows(to_slots, source.read_rows(from_slots))
        handoff.sent = end

    def _deliver(self) -> None:
        """Events to the transcripts; new leases to the prefill engine; what nobody waits for any more is let go."""
        self.prefill.deliver()
        self.decode.deliver()
        for name in sorted(self._unleased):
            here = self.decode.transcripts[name]
            if here.request_ended or here.is_local or here.blocks is not None:
                self._unleased.remove(name)
            if here.is_local:
                self.tally.local_prefills += 1
            elif here.blocks is not None and not here.request_ended:
                there = self.prefill.submit(replace(here.request, work=Work.PREFILL))
                self.handoffs[name] = Handoff(there, here, here.num_leased_cached)
        for name in [n for n, handoff in self.handoffs.items() if handoff.here.request_ended]:
            self._drop_handoff(name)

    def _drop_handoff(self, name: RequestId) -> None:
        if self.handoffs.pop(name, None) is not None:
            self.prefill.cancel(name)

    # --- weights and caches

    def forget_prefixes(self, rig: ModelRig) -> None:
        """Live sequences go on."""
        self.tally.cache_resets += 1
        rig.core.reset_prefix_cache()
        assert rig.core.load().kv_blocks_cached == 0
        self._check()

    def begin_update(self) -> None:
        """From now on open prompts come to their end; `try_update` is called until it succeeds."""
        self.is_updating = True
        for rig in (self.prefill, self.decode):
            rig.core.close_admission()

    def try_update(self) -> bool:
        """Swaps the weights of both engines, unless a prompt of either is open."""
        rigs = (self.prefill, self.decode)
        if not self.is_updating or any(rig.core.has_open_prompts() for rig in rigs):
            return False
        self.version += 1
        for rig in rigs:
            rig.use(self._model.decoder(self.version), label_of(self.version))
            rig.core.open_admission()
        self.is_updating = False
        self.tally.weight_updates += 1
        self._check()
        return True

    # --- the end

    def check_everything(self, oracle: Oracle) -> None:
        """Nobody is live any more: nothing is held, and what everybody was told is right.

        Raises:
            AssertionError: something is wrong; says with which request.
        """
        for rig in (self.prefill, self.decode):
            rig.assert_baseline()
            assert rig.core.stats.step_failures == 0
            self.tally.count(rig.core.stats)
            for name, transcript in rig.transcripts.items():
                self.tally.straddling += any(len({t.weight_version for t in c.tokens}) > 1 for c in transcript.all)
                try:
                    check(transcript, self._asks[name], oracle, complete=name not in rig.silenced)
                except AssertionError as error:
                    raise AssertionError(f"{transcript.request}: {error}") from error

    def _check(self) -> None:
        for rig in (self.prefill, self.decode):
            found = rig.core.check_invariants()
            assert not found, "; ".join(found)
