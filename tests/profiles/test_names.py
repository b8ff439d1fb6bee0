"""Names of work: every framework's, read as ops, and nothing else."""

from __future__ import annotations

import pytest

from treadle import LoweringOptions, generate, load_costs
from treadle.ir.ops import OpKind
from treadle.lowering.lower import lower
from treadle.profiles.work_names import PPOp, begun_as, is_sharding, layers_of, op_of, ops_of, pp_name, pp_ops

NAMES = {
    "attn(F)": (OpKind.ATTN_F, -1),
    "dispatch(B)": (OpKind.DISPATCH_B, -1),
    "mlp(W)": (OpKind.MLP_W, -1),
    "pre_dispatch_computation forward": (OpKind.ATTN_F, -1),
    "pre_dispatch_computation wgrad": (OpKind.ATTN_W, -1),
    "moe_combine backward": (OpKind.COMBINE_B, -1),
    "layer05.stage1_f": (OpKind.ATTN_F, 5),
    "layer11.stage3_w": (OpKind.MLP_W, 11),
    "forward-compute": (OpKind.F, -1),
    "backward-recv": (OpKind.RECV_B, -1),
    "params-all-gather": (OpKind.GATHER_PARAMS, -1),
    "a.b.P2PCommunicator.recv_forward": (OpKind.RECV_F, -1),
}

NOT_OPS = [
    *("dispatch(W)", "attn(G)", "attn", "mattn(F)", "layer05.stage5_f", "1F1B", "", "forward", "send", "recv_", "PP:"),
    *(
        "forward-send-",
        "PP:0F",
        "PP:F3",
        "PP:0F3 ",
        "PP:01F3",
        "PP:0UNSHARD",
        "PP:0WAIT_SEND_F3",
        "PP:(0F4)OVERLAP_F_B",
        "Forward",
        "pp:0F3",
    ),
    *("PP:(0SEND_F1;1B0)OVERLAP_F_B", "PP:attn_f 3.1", "PP:head_f 3.1 L0", "PP:reduce_grad 1.0", "PP:f 3.1", "PP:CLIP"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_op(name: str) -> None:
    assert op_of(name) == NAMES[name]
    assert ops_of(name) == (NAMES[name][0],)
    assert pp_ops(name) == ()


@pytest.mark.parametrize("name", NOT_OPS)
def test_other_names_are_none(name: str) -> None:
    assert (op_of(name), ops_of(name), pp_ops(name)) == (None, (), ())


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("forward-send-backward-recv", "SEND_F RECV_B"),
        ("forward-backward-send-forward-backward-recv", ""),
        ("x.P2PCommunicator.send_forward_recv_forward", "SEND_F RECV_F"),
        ("send_forward_backward_recv_forward_backward", "SEND_F SEND_B RECV_F RECV_B"),
    ],
)
def test_messages_exchanged_at_once_are_several(name: str, kinds: str) -> None:
    assert " ".join(kind.name for kind in ops_of(name)) == kinds
    assert op_of(name) is None


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("PP:0F3", [PPOp(OpKind.F, 3, 0)]),
        ("PP:12I10", [PPOp(OpKind.I, 10, 12)]),
        ("PP:1SEND_F3", [PPOp(OpKind.SEND_F, 3, 1)]),
        ("PP:2RECV_B0", [PPOp(OpKind.RECV_B, 0, 2)]),
        ("PP:0REDUCE_GRAD", [PPOp(OpKind.REDUCE_GRAD, -1, 0)]),
        ("PP:(0F4;7B2)OVERLAP_F_B", [PPOp(OpKind.F, 4, 0), PPOp(OpKind.B, 2, 7, joined=True)]),
        ("Forward 3", [PPOp(OpKind.F, 3)]),
        ("Backward 0", [PPOp(OpKind.B, 0)]),
        ("PP:attn_f 3.1 L0", [PPOp(OpKind.ATTN_F, 3, chunk=1)]),
        ("PP:clip", [PPOp(OpKind.CLIP)]),
    ],
)
def test_pp_names_say_micro_batch_and_stage(name: str, ops: list[PPOp]) -> None:
    assert list(pp_ops(name)) == ops


def test_every_label_of_a_program_is_read_back() -> None:
    schedule = generate("dualpipev", pp=2, microbatches=4)
    options = LoweringOptions(layers=2, moe=True, recompute=("mlp",))
    program = lower(schedule, load_costs("deepseek-v3-h800"), options)
    read = set()
    for index in range(program.num_ops):
        op = program.op(index)
        (named,) = pp_ops(pp_name(op, schedule.placement))
        assert (named.kind, named.mb, named.layer) == (op.kind, op.mb, op.layer), op
        if named.stage == -1:
            assert named.chunk == op.chunk
        elif op.kind.is_send:
            made = schedule.placement.stage(op.lane.peer, op.chunk) - (1 if op.kind is OpKind.SEND_F else -1)
            assert named.stage == made
        else:
            assert named.stage == schedule.placement.stage(op.lane.rank, op.chunk)
        read.add(op.kind)
    assert {OpKind.SEND_F, OpKind.RECV_B, OpKind.ATTN_F, OpKind.MLP_R} <= read


def test_megatron_names_the_layers_of_a_range() -> None:
    assert layers_of("layer_3f-layer_0b") == (3, 0)
    assert layers_of("layer_3f") == (3, -1)
    assert layers_of("layer_12b") == (-1, 12)
    for name in ("layer_", "layer_3", "layer_-", "layer_3f-", "layer_3f-0b", "layer_3flayer_0b", "layer_3f0b"):
        assert layers_of(name) is None, name


def test_fsdp_is_known_by_name() -> None:
    assert is_sharding("PP:0UNSHARD")
    assert is_sharding("PP:3RESHARD")
    assert not is_sharding("PP:0F3")


def test_a_wait_of_torch_and_a_later_call_of_treadle_go_on_with_an_op() -> None:
    assert begun_as("PP:0WAIT_SEND_F3") == "PP:0SEND_F3"
    assert begun_as("PP:12WAIT_SEND_B10") == "PP:12SEND_B10"
    assert begun_as("PP:0WAIT_REDUCE_GRAD") == "PP:0REDUCE_GRAD"
    assert begun_as("PP:1RECV_F0 continued") == "PP:1RECV_F0"
    for name in ("PP:0SEND_F3", "PP:0WAIT_RECV_F3", "PP:0WAIT_SEND_F", "0WAIT_SEND_F3", "PP:0WAIT_UNSHARD", ""):
        assert begun_as(name) is None, name
