"""One request as the scheduler sees it: counts first, token ids only for a recomputation."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace

from services.scheduler.hashing import HashChain
from services.scheduler.in_flight import Fence
from shared.messages import EnteringSequence, Route
from shared.sampling import SamplingParams
from shared.types import Handle, Int32s, RequestId

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that was accepted and has not ended.

    [0, num_computed)           KV is in `blocks`, or a plan that is under way puts it there
    [num_computed, num_tokens)  still to be computed
    [0, len(token_ids))         ids are known here; from there to num_tokens they are under way
    [0, num_registered)         of `blocks`: full, confirmed by results, and found by others

    A lease may have computed more than that, or a jump: it counts once its results are back.
    """

    request_id: RequestId
    handle: Handle  # rises with arrival; later ones if its detokenizer is told later than others'
    route: Route
    asked: SamplingParams  # max_tokens may be None: as many as there is room for
    max_tokens: int
    token_ids: Int32s  # prompt and output
    arrived: float  # loop time, seconds
    tenant: str = ""
    priority: int = 0  # lower is more urgent
    cache_salt: str = ""
    num_output: InitVar[int] = 0  # of token_ids at the beginning
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    num_inputs: int = field(init=False)  # tokens that are ever computed: the last is only sampled
    jumps: bool = field(init=False)  # an iteration may bring it several tokens
    num_computed: int = 0
    executor: str = ""  # the name of the one that it runs on, or ran on last
    slot: int = NO_SLOT  # of the executor's batch, while running
    blocks: list[int] = field(default_factory=list)
    admissions: int = 0
    fence: Fence | None = None  # preempted: until it is passed, results may still bring tokens
    opened: bool = False  # its detokenizer knows of it, or will before it runs
    retold: bool = False  # whoever is told of it next knows nothing of it, or too little
    recall: int = 0  # held until its detokenizer has said what it knows; 0: not held
    resubmitted: bool = False  # which it has
    executor_deaths: int = 0
    chain: HashChain | None = None  # of its full blocks, once it was considered
    num_registered: int = 0
    num_cached: int = 0  # tokens of the prompt that were found at the first admission

    def __post_init__(self, num_output: int) -> None:
        self.num_tokens = len(self.token_ids)
        self.num_prompt = self.num_tokens - num_output
        self.jumps = self.asked.jumps
        self.limit(self.max_tokens)

    @property
    def params(self) -> SamplingParams:
        """What was asked, with `max_tokens` set."""
        return replace(self.asked, max_tokens=self.max_tokens)

    @property
    def running(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def held(self) -> bool:
        """Whether it may not run yet: what its detokenizer knows of it has to be settled."""
        return bool(self.recall) or not self.opened

    @property
    def settled(self) -> bool:
        """Whether no result that is under way can bring tokens of it."""
        return not self.running and (self.fence is None or self.fence.passed)

    @property
    def fresh(self) -> bool:
        """Whether this is the first time that it runs, here or anywhere, as far as is known."""
        return self.admissions == 1 and not self.output_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that a plan can compute now; 1 for a decode, 0 if all it may have is planned."""
        return min(self.num_tokens, self.num_inputs) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is missing from the KV cache."""
        return self.num_tokens == self.num_computed + 1 and self.num_computed >= self.num_prompt

    @property
    def output_tokens(self) -> int:
        """Tokens generated, as far as their ids are known here."""
        return len(self.token_ids) - self.num_prompt

    def assign(self, detokenizer: str) -> None:
        """Whom to tell of it; only when it is settled.

        It will be told of the tokens that are known here; those that a client wants to hear more
        of than their text it must see for itself, so they are generated again.
        """
        self.route = replace(self.route, detokenizer=detokenizer)
        if self.retold and self.asked.wants_tokens:
            self.rewind(self.token_ids[: self.num_prompt])

    def rewind(self, token_ids: Int32s) -> None:
        """Go on from these tokens, which it has generated for certain; only while it waits."""
        self.token_ids = token_ids[:]
        self.num_tokens = len(token_ids)
        self.chain = None  # it may know more than these

    def limit(self, max_tokens: int) -> None:
        """Let it generate no more than so many tokens; of 0, one is sampled that ends it."""
        self.max_tokens = max_tokens
        self.num_inputs = self.num_prompt + max(max_tokens, 1) - 1

    def blocks_needed(self, num_tokens: int, block_size: int) -> int:
        """Blocks missing for the KV of the first `num_tokens` tokens."""
        return -(-num_tokens // block_size) - len(self.blocks)

    def entering(self) -> EnteringSequence:
        """What the executor must know to take it into its batch."""
        return EnteringSequence(
            slot=self.slot,
            handle=self.handle,
            detokenizer=self.route.detokenizer,
            prompt_tokens=self.num_prompt,
            params=self.params,
            token_ids=self.token_ids,  # no copy: the plan is encoded at once
        )
