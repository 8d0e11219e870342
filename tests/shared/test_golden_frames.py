"""The wire format, byte for byte: services of two builds may only meet if they agree on it."""

from __future__ import annotations

import pytest

from shared.codec import VERSION, Identity, decode, encode
from shared.messages import (
    REGISTRY,
    Abort,
    Accepted,
    Admitted,
    Announce,
    Credit,
    Decode,
    Decoded,
    Deltas,
    Embedding,
    Encode,
    Encoded,
    EnteringSequence,
    Failed,
    Failure,
    Figure,
    Finished,
    Generate,
    Gone,
    Leaving,
    Logprobs,
    Message,
    MetricsReply,
    MetricsRequest,
    Open,
    Plan,
    Prompt,
    Recall,
    Recalled,
    Refused,
    Released,
    Reopen,
    Roster,
    Route,
    Status,
    StatusReply,
    StatusRequest,
    StepResult,
    Submit,
    TokenDetails,
    TraceReply,
    TraceRequest,
    Withdraw,
)
from shared.sampling import Grammar, GrammarKind, LogitBias, SamplingParams
from shared.types import FinishReason, Handle, Incarnation, RequestId, ServiceName, State, int32s

SENDER = Identity(ServiceName.SCHEDULER, "scheduler.1", Incarnation(2**62 + 5))
SENT = 123_456_789  # ns
ID = RequestId("req-1")
IDS = int32s([1, -2, 300])
TOKENS = int32s([1, 2, 300])
ROUTE = Route("gateway.0", "detokenizer.3")
FAILURE = Failure(400, "too long", param="prompt", code="context_length_exceeded")
PARAMS = SamplingParams(
    seed=2**63 - 1,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    max_tokens=16,
    min_tokens=2,
    ignore_eos=True,
    stop_token_ids=int32s([2]),
    stop=["\n\n", "\u00e9nd"],
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
    logit_bias=[LogitBias(5, -100.0)],
    allowed_token_ids=int32s([5, 6]),
    bad_words=["no"],
    bad_word_ids=[int32s([7, 8])],
    grammar=Grammar(GrammarKind.REGEX, "[a-z]+"),
    logprobs=2,
    prompt_logprobs=0,
    return_token_ids=True,
    echo=True,
)
LOGPROBS = Logprobs(
    handles=int32s([9]),
    positions=int32s([3]),
    ranks=int32s([1]),
    counts=int32s([2]),
    token_ids=int32s([2, 7]),
    values=bytes(8),
)
DETAILS = TokenDetails(
    ID,
    position=2,
    token_ids=int32s([5, 6]),
    pieces=[b"a", b"\xe2\x80"],
    text_offsets=int32s([0, 1]),
    ranks=int32s([0, 2]),
    counts=int32s([0, 1]),
    pair_ids=int32s([6]),
    pair_pieces=[b"\xe2\x80"],
    values=bytes(4),
)

MESSAGES: list[Message] = [
    Generate(
        ID, Prompt(chat='{"messages":[]}', add_special_tokens=False), PARAMS, ROUTE, "key1", -2, "s"
    ),
    Refused(ID, FAILURE),
    Submit(ID, IDS, SamplingParams(seed=0), ROUTE, "key1", -2, "s", 1),
    Open(ID, Handle(9), "gateway.0", TOKENS, PARAMS, 1, "key1", -2, "s"),
    Accepted(ID, 3, "scheduler.1"),
    Announce("f00d", 512, 16, 64, 2048, 8192, 49152, session=3),
    Plan(
        step=7,
        retired=int32s([3]),
        entering=[EnteringSequence(2, Handle(9), "detokenizer.3", 2, PARAMS, IDS)],
        block_slots=int32s([2, 0]),
        block_counts=int32s([1, 2]),
        block_ids=int32s([10, 11, 12]),
        row_slots=int32s([0, 2]),
        row_starts=int32s([31, 0]),
        row_tokens=int32s([1, 3]),
        lease=5,
        session=3,
        jump=8,
    ),
    StepResult(
        epoch=Incarnation(11),
        step=7,
        handles=int32s([4, 9]),
        positions=int32s([32, 3]),
        token_ids=int32s([5, 2]),
        finishes=bytes([0, 1]),
        iteration=3,
        logprobs=LOGPROBS,
        embeddings=[Embedding(Handle(4), bytes(8))],
    ),
    Deltas(
        [ID],
        ["ol\u00e1"],
        int32s([0]),
        int32s([1]),
        [
            Finished(ID, FinishReason.STOP, 4, stop_reason="\n\n"),
            Finished(ID, FinishReason.STOP, 4, stop_reason=2),
            Finished(ID, FinishReason.ERROR, 0, failure=FAILURE),
        ],
        [DETAILS],
    ),
    Abort(ID, "client left"),
    Failed(ID, Failure(500, "poison")),
    Credit(64, 1024, 3, 1),
    Encode(ID, Prompt(text="hi")),
    Encoded(ID, IDS, 8192),
    Decode(ID, IDS),
    Decoded(ID, "hi"),
    MetricsRequest(ID),
    MetricsReply(ID, "# HELP x\n"),
    TraceRequest(ID, 5_000_000_000),
    TraceReply(ID, 2**40, ["plan"], bytes(48)),
    Admitted(ID, 160),
    Recall(3, IDS),
    Recalled(3),
    Roster(["model-executor.0", "model-executor.1"]),
    Reopen(ID, "detokenizer.1"),
    Gone(ID),
    Leaving(),
    StatusRequest(ID),
    StatusReply(ID, Status(State.LEAVING, "host", 71, 2.5, [Figure("running", 3.0)])),
    Withdraw(),
    Released([ID]),
]
GOLDEN = {
    "Generate": (
        "970701a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1597"
        "a57265712d3196c0c0af7b226d65737361676573223a5b5d7dc2c0c0dc0019cf7fffffffffffffff"
        "cb3fe6666666666666cb3feccccccccccccd28cb3fa999999999999a1002c3c4040200000092a20a"
        "0aa4c3a96e64c3c2cb3fe0000000000000cbbfe0000000000000cb3ff4000000000000919205cbc0"
        "59000000000000c408050000000600000091a26e6f91c40807000000080000009202a65b612d7a5d"
        "2b0200c3c3c292a9676174657761792e30ad6465746f6b656e697a65722e33a46b657931fea173"
    ),
    "Refused": (
        "970702a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d3194cd0190a8746f6f206c6f6e67a670726f6d7074b7636f6e746578745f6c656e6774"
        "685f6578636565646564"
    ),
    "Submit": (
        "970703a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1598"
        "a57265712d31c40c01000000feffffff2c010000dc001900cb3ff0000000000000cb3ff000000000"
        "000000cb0000000000000000c000c2c40090c2c3cb0000000000000000cb0000000000000000cb3f"
        "f000000000000090c4009090c0c0c0c2c2c292a9676174657761792e30ad6465746f6b656e697a65"
        "722e33a46b657931fea17301"
    ),
    "Open": (
        "970704a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1599"
        "a57265712d3109a9676174657761792e30c40c01000000020000002c010000dc0019cf7fffffffff"
        "ffffffcb3fe6666666666666cb3feccccccccccccd28cb3fa999999999999a1002c3c40402000000"
        "92a20a0aa4c3a96e64c3c2cb3fe0000000000000cbbfe0000000000000cb3ff40000000000009192"
        "05cbc059000000000000c408050000000600000091a26e6f91c40807000000080000009202a65b61"
        "2d7a5d2b0200c3c3c201a46b657931fea173"
    ),
    "Accepted": (
        "970705a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1593"
        "a57265712d3103ab7363686564756c65722e31"
    ),
    "Announce": (
        "970706a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1598"
        "a466303064cd02001040cd0800cd2000cdc00003"
    ),
    "Plan": (
        "970707a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd159c"
        "07c4040300000091960209ad6465746f6b656e697a65722e3302dc0019cf7fffffffffffffffcb3f"
        "e6666666666666cb3feccccccccccccd28cb3fa999999999999a1002c3c4040200000092a20a0aa4"
        "c3a96e64c3c2cb3fe0000000000000cbbfe0000000000000cb3ff4000000000000919205cbc05900"
        "0000000000c408050000000600000091a26e6f91c40807000000080000009202a65b612d7a5d2b02"
        "00c3c3c2c40c01000000feffffff2c010000c4080200000000000000c4080100000002000000c40c"
        "0a0000000b0000000c000000c4080000000002000000c4081f00000000000000c408010000000300"
        "0000050308"
    ),
    "StepResult": (
        "970708a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1599"
        "0b07c4080400000009000000c4082000000003000000c4080500000002000000c40200010396c404"
        "09000000c40403000000c40401000000c40402000000c4080200000007000000c408000000000000"
        "0000919204c4080000000000000000"
    ),
    "Deltas": (
        "970709a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1596"
        "91a57265712d3191a46f6cc3a1c40400000000c404010000009396a57265712d310104a20a0ac0c4"
        "0096a57265712d31010402c0c40096a57265712d310400c094cd0190a8746f6f206c6f6e67a67072"
        "6f6d7074b7636f6e746578745f6c656e6774685f6578636565646564c400919aa57265712d3102c4"
        "08050000000600000092c40161c402e280c4080000000001000000c4080000000002000000c40800"
        "00000001000000c4040600000091c402e280c40400000000"
    ),
    "Abort": (
        "97070aa97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31ab636c69656e74206c656674"
    ),
    "Failed": (
        "97070ba97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d3194cd01f4a6706f69736f6ec0c0"
    ),
    "Credit": (
        "97070ca97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1594"
        "40cd04000301"
    ),
    "Encode": (
        "97070da97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d3196a26869c0c0c3c0c0"
    ),
    "Encoded": (
        "97070ea97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1593"
        "a57265712d31c40c01000000feffffff2c010000cd2000"
    ),
    "Decode": (
        "97070fa97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31c40c01000000feffffff2c010000"
    ),
    "Decoded": (
        "970710a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31a26869"
    ),
    "MetricsRequest": (
        "970711a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1591"
        "a57265712d31"
    ),
    "MetricsReply": (
        "970712a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31a9232048454c5020780a"
    ),
    "TraceRequest": (
        "970713a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31cf000000012a05f200"
    ),
    "TraceReply": (
        "970714a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1594"
        "a57265712d31cf000001000000000091a4706c616ec4300000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000000000"
    ),
    "Admitted": (
        "970715a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31cca0"
    ),
    "Recall": (
        "970716a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "03c40c01000000feffffff2c010000"
    ),
    "Recalled": (
        "970717a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd159103"
    ),
    "Roster": (
        "970718a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1591"
        "92b06d6f64656c2d6578656375746f722e30b06d6f64656c2d6578656375746f722e31"
    ),
    "Reopen": (
        "970719a97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592"
        "a57265712d31ad6465746f6b656e697a65722e31"
    ),
    "Gone": (
        "97071aa97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1591"
        "a57265712d31"
    ),
    "Leaving": "97071ba97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1590",
    "StatusRequest": (
        "97071ca97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1591a5"
        "7265712d31"
    ),
    "StatusReply": (
        "97071da97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1592a5"
        "7265712d319502a4686f737447cb40040000000000009192a772756e6e696e67cb4008000000000000"
    ),
    "Withdraw": (
        "97071ea97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1590"
    ),
    "Released": (
        "97071fa97363686564756c6572ab7363686564756c65722e31cf4000000000000005ce075bcd1591"
        "91a57265712d31"
    ),
}
CHANGED = "the wire format changed: raise VERSION in shared/codec.py and put the new bytes here"


def name_of(message: Message) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_frame_is_what_it_was(message: Message) -> None:
    frame = encode(message, SENDER, SENT)
    assert frame.hex() == GOLDEN[name_of(message)], CHANGED
    assert decode(frame) == (message, SENDER, SENT)


def test_each_message_has_its_frame() -> None:
    names = [kind.__name__ for kind in REGISTRY.values()]
    assert [name_of(message) for message in MESSAGES] == names
    assert list(GOLDEN) == names


def test_each_frame_says_its_version_and_tag_first() -> None:
    for tag, golden in zip(REGISTRY, GOLDEN.values(), strict=True):
        assert bytes.fromhex(golden)[:3] == bytes([0x97, VERSION, tag])
