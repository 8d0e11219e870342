"""The block pool under any history, beside a model that keeps the blocks' true content.

The machine plays planner and executor: sequences are admitted with what is cached, computed piece
by piece, written to in advance by iterations whose results are discarded, and ended at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.hashing import HashChain, chain_root
from services.scheduler.prefix_cache import CachingBlockPool
from shared.types import int32s

NUM_BLOCKS = 7
BLOCK_SIZE = 2
GARBAGE = -1

Content = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the block's end


@dataclass(slots=True, eq=False)
class Played:
    """A sequence that runs: the KV of its first `num_computed` tokens is in its blocks."""

    salt: str
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    num_registered: int  # blocks
    chain: HashChain = field(init=False)

    def __post_init__(self) -> None:
        self.chain = chain_of(self.salt, self.tokens)


def chain_of(salt: str, tokens: list[int]) -> HashChain:
    chain = HashChain(chain_root("model", cache_salt=salt), BLOCK_SIZE)
    chain.extend(int32s(tokens))
    return chain


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = CachingBlockPool(NUM_BLOCKS)
        self.running: list[Played] = []
        # What each slot of each block was computed from: salt and all tokens up to it.
        self.memory: list[list[Content | None]] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.registered: dict[int, Content] = {}  # of blocks in use or cached
        self.findable: dict[Content, int] = {}
        self.lru: list[int] = []  # cached and in no table, the oldest first
        self.seen: set[Content] = set()
        self.evictions = 0

    @property
    def in_use(self) -> list[int]:
        """Blocks in all tables; a shared one as often as it is shared."""
        return [block for sequence in self.running for block in sequence.blocks]

    def contents(self, salt: str, tokens: list[int]) -> list[Content]:
        """What the full blocks of this sequence must hold."""
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def take(self, count: int) -> list[int]:
        for _ in range(count - (NUM_BLOCKS - len(set(self.in_use)) - len(self.lru))):
            del self.findable[self.registered.pop(self.lru.pop(0))]
            self.evictions += 1
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.in_use)
        return blocks

    def write(self, sequence: Played, position: int, *, discarded: bool = False) -> None:
        tokens = [*sequence.tokens[:position], GARBAGE if discarded else sequence.tokens[position]]
        block = sequence.blocks[position // BLOCK_SIZE]
        assert block not in self.registered, "a registered block is written to"
        self.memory[block][position % BLOCK_SIZE] = (sequence.salt, tuple(tokens))

    @rule(salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, salt: str, tokens: list[int]) -> None:
        chain = chain_of(salt, tokens)
        found = self.pool.lookup(chain.reusable(len(tokens)))
        assert len(found) * BLOCK_SIZE < len(tokens)
        for block, content in zip(found, self.contents(salt, tokens), strict=False):
            for offset, kv in enumerate(reversed(self.memory[block])):
                assert kv == (salt, content[1][: len(content[1]) - offset])
        missing = -(-len(tokens) // BLOCK_SIZE) - len(found)
        if missing + self.pool.count_free(found) > self.pool.num_free:
            return
        self.pool.acquire(found)
        self.lru = [block for block in self.lru if block not in found]
        sequence = Played(salt, tokens, found, len(found) * BLOCK_SIZE, len(found))
        self.running.append(sequence)
        sequence.blocks = found + self.take(missing)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        """The result of an iteration comes back; one that has all computed gets a token more."""
        sequence = data.draw(st.sampled_from(self.running))
        end = min(sequence.num_computed + count, len(sequence.tokens))
        for position in range(sequence.num_computed, end):
            self.write(sequence, position)
        sequence.num_computed = end
        self.register(sequence)
        room = self.pool.num_free > 0 or end < len(sequence.blocks) * BLOCK_SIZE
        if end == len(sequence.tokens) and room:
            sequence.tokens.append(data.draw(st.integers(0, 1)))
            if end == len(sequence.blocks) * BLOCK_SIZE:
                sequence.blocks += self.take(1)

    def register(self, sequence: Played) -> None:
        sequence.chain.extend(int32s(sequence.tokens))
        contents = self.contents(sequence.salt, sequence.tokens)
        for index in range(sequence.num_registered, sequence.num_computed // BLOCK_SIZE):
            block, content = sequence.blocks[index], contents[index]
            self.pool.register(block, sequence.chain.digests[index])
            self.registered[block] = content
            self.findable.setdefault(content, block)
            self.seen.add(content)
        sequence.num_registered = sequence.num_computed // BLOCK_SIZE

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finished, aborted or set back, with an iteration under way whose result is discarded."""
        sequence = data.draw(st.sampled_from(self.running))
        for position in range(sequence.num_computed, len(sequence.tokens)):
            self.write(sequence, position, discarded=True)
        self.running.remove(sequence)
        self.pool.give_back(sequence.blocks)
        for block in reversed(sequence.blocks):
            if block not in self.in_use and block in self.registered:
                self.keep(block)

    def keep(self, block: int) -> None:
        known = self.findable.setdefault(self.registered[block], block)
        if known == block:
            self.lru.append(block)
            return
        del self.registered[block]
        if known in self.lru:
            self.lru.remove(known)
            self.lru.append(known)

    @invariant()
    def free_and_used_add_up(self) -> None:
        used = set(self.in_use)
        assert self.pool.num_free == NUM_BLOCKS - len(used)
        assert self.pool.count_free(range(NUM_BLOCKS)) == self.pool.num_free
        assert self.pool.count_free(used) == 0
        assert abs(self.pool.usage - len(used) / NUM_BLOCKS) < 1e-9

    @invariant()
    def blocks_are_shared_only_by_equal_content(self) -> None:
        owners: dict[int, set[Content]] = {}
        for sequence in self.running:
            for index, block in enumerate(sequence.blocks):
                end = (index + 1) * BLOCK_SIZE
                content = (sequence.salt, tuple(sequence.tokens[:end]))
                owners.setdefault(block, set()).add(content)
        for block, contents in owners.items():
            assert len(contents) == 1
            if self.in_use.count(block) > 1:
                assert self.registered[block] in contents

    @invariant()
    def just_what_should_be_cached_is_found(self) -> None:
        for salt, tokens in self.seen:
            block = self.findable.get((salt, tokens))
            digest = chain_of(salt, list(tokens)).digests[-1]
            assert self.pool.lookup([digest]) == ([] if block is None else [block])
        assert self.pool.stats.evictions == self.evictions

    def teardown(self) -> None:
        for sequence in self.running:
            self.pool.give_back(sequence.blocks)
        assert self.pool.num_free == NUM_BLOCKS
        assert sorted(self.pool.take(NUM_BLOCKS)) == list(range(NUM_BLOCKS))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
