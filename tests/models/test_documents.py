"""Packed documents: each token sees its own document alone, in one process and in pipelines, with MTP too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.runs import Batch, Layout, furthest, gradients_of, run_step
from tests.models.tiny import QWEN3_MOE, VOCAB, apart, tokens
from tests.support.devices import drawn
from tests.support.ranks import check, run_ranks
from treadle.models import IGNORED, Documents, ModelConfig, build_stages, loss_fn, run_stage, save_pretrained
from treadle.models.decoder_layers import DecoderLayer
from treadle.models.mtp import TokenPredictor
from treadle.runtime.model.segments import reference_forward

EVERYTHING = replace(
    QWEN3_MOE,
    num_hidden_layers=5,
    first_k_dense_replace=1,
    router_aux_loss_coef=0.3,
    num_nextn_predict_layers=2,
    mtp_loss_weight=0.7,
    tie_word_embeddings=True,
)


def _model(config: ModelConfig) -> nn.Sequential:
    return build_stages(config, (config.blocks,), {0: 0}, seed=4)[0]


def _packed(num: int) -> Batch:
    """Documents of different lengths; nothing is predicted across their ends."""
    inputs = tokens(num)[:, :-1].contiguous()
    generator = torch.Generator().manual_seed(7)
    starts = drawn(torch.rand, inputs.shape, generator=generator) < 0.25
    documents = starts.cumsum(-1) + 5
    targets = tokens(num)[:, 1:].clone()
    targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    return Batch(inputs, targets, documents, Documents.of(documents).positions(documents.device))


def test_packed_documents_are_each_document_alone() -> None:
    model, batch = _model(QWEN3_MOE), _packed(4)
    with torch.no_grad():
        packed = run_stage(model, batch.inputs, positions=batch.positions, documents=Documents.of(batch.documents))
        for row, (sample, documents) in enumerate(zip(batch.inputs, batch.documents, strict=True)):
            for document in documents.unique():
                where = documents == document
                alone = run_stage(model, sample[where].unsqueeze(0))
                assert apart(packed[row, where], alone[0]) <= 1e-6
        causal = run_stage(model, batch.inputs)
    assert apart(causal, packed) > 1e-2


def test_the_gradients_of_packed_documents_are_those_of_each_alone() -> None:
    packed, alone, batch = _model(QWEN3_MOE), _model(QWEN3_MOE), _packed(4)
    loss_fn(run_stage(packed, batch.inputs, documents=Documents.of(batch.documents)), batch.targets).backward()  # type: ignore[no-untyped-call]
    for sample, target, documents in zip(batch.inputs, batch.targets, batch.documents, strict=True):
        for document in documents.unique():
            where = documents == document
            loss = loss_fn(run_stage(alone, sample[where].unsqueeze(0)), target[where].unsqueeze(0))
            loss.backward()  # type: ignore[no-untyped-call]
    assert furthest(gradients_of({0: packed}), gradients_of({0: alone}))[0] <= 1e-5


def test_mtp_of_packed_documents_is_that_of_each_alone() -> None:
    """Each block predicts one token further, of the same document."""
    block = next(b for b in _model(EVERYTHING) if isinstance(b, TokenPredictor) and b.depth == 2)
    batch = _packed(4)
    hidden = drawn(torch.randn, *batch.inputs.shape, EVERYTHING.hidden_size, generator=torch.Generator().manual_seed(3))
    out, loss = block(hidden, batch.targets, batch.positions, Documents.of(batch.documents))
    total, num = torch.zeros(()), 0
    for row, documents in enumerate(batch.documents):
        for document in documents.unique():
            where = documents == document
            of_document = batch.inputs[row, where]
            alone, alone_loss = block(hidden[row, where].unsqueeze(0), batch.targets[row, where].unsqueeze(0))
            inside = int(where.sum()) - 2  # of the last two tokens, the one two further is not known
            if inside > 0:
                assert apart(out[row, where][:inside], alone[0, :inside]) <= 1e-6
                by_hand = loss_fn(block.shared_head(alone[:, : inside - 1]), of_document[3:].unsqueeze(0))
                torch.testing.assert_close(_all_but_last(alone_loss, block, alone, batch, row, where), by_hand)
                num += 1
            total = total + alone_loss
    assert num > 3
    torch.testing.assert_close(loss, total)


def _all_but_last(loss: Tensor, block: TokenPredictor, hidden: Tensor, batch: Batch, row: int, where: Tensor) -> Tensor:
    """A document's loss without its last target, which is known only if the document goes on behind the sample."""
    last = int(where.nonzero()[-1])
    target = batch.targets[row, last]
    if target == IGNORED:
        return loss
    return loss - loss_fn(block.shared_head(hidden[:, -3:-2]), target.reshape(1, 1))


def _reference(config: ModelConfig, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients and losses of one process: a plain loop over samples, which are the micro-batches."""
    model = _model(config)
    sums = {"main": 0.0, "aux_loss": 0.0, "mtp_0": 0.0, "mtp_1": 0.0}
    num = len(batch.inputs)
    for at in range(num):
        one = batch.part(at, num)
        total: Any = 0.0
        x: Any = one.inputs
        hidden: Tensor | None = None
        for block in model:
            if isinstance(block, DecoderLayer):
                values = reference_forward(block, x, **one.side)
                x = values["x"]
                aux = values.get("aux_loss", torch.zeros(()))
                sums["aux_loss"] += float(aux.detach()) / num
                total = total + aux / num
            elif isinstance(block, TokenPredictor):
                hidden, loss = block(x if hidden is None else hidden, one.targets, **one.side)
                sums[f"mtp_{block.depth - 1}"] += float(loss.detach()) / batch.num_tokens
                total = total + config.mtp_loss_weight * loss / batch.num_tokens
            else:
                x = block(x)
        main = loss_fn(x, one.targets) / batch.num_tokens
        sums["main"] += float(main.detach())
        (total + main).backward()
    return gradients_of({0: model}), sums


LAYOUTS = [
    Layout("interleaved-overlap", pp=2, ep=2),
    Layout("interleaved-overlap", pp=2, ep=2, options={"saved": "offload", "recompute": ("attn", "mlp")}),
    Layout("1f1b", pp=4, microbatches=8),
    Layout("dualpipev", pp=2, dp=2),
    Layout("dualpipe", pp=2, dp=2),
    Layout("gpipe", pp=1, ep=2, dp=2, microbatches=2),
]


def _run(
    rank: int, directory: Path, batch: Batch, wanted: Path
) -> list[tuple[str, float, str, float, dict[str, float]]]:
    expected = torch.load(wanted, map_location="cpu")
    found = []
    for layout in LAYOUTS:
        made = run_step(rank, layout, EVERYTHING, directory, batch)
        found.append((str(layout), *furthest(made["gradients"], expected), made["loss"], made["by_name"]))
    return found


@pytest.mark.slow
def test_pipelines_of_packed_documents_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    """With MTP, a tied head, a dense first layer, and a balance loss in every other."""
    batch = _packed(8)
    assert int(batch.inputs.max()) < VOCAB
    expected, losses = _reference(EVERYTHING, batch)
    torch.save(expected, tmp_path / "gradients.pt")
    save_pretrained({0: _model(EVERYTHING)}, EVERYTHING, tmp_path)
    total = losses["main"] + losses["aux_loss"] + 0.7 * (losses["mtp_0"] + losses["mtp_1"])
    for rank, of_rank in enumerate(check(run_ranks(4, _run, tmp_path, batch, tmp_path / "gradients.pt"))):
        for layout, difference, name, loss, by_name in of_rank:
            assert difference <= 1e-5, f"{layout}, rank {rank}: {name} is {difference} apart"
            assert loss == pytest.approx(total, rel=1e-6), layout
            got = {key: by_name[key] for key in ("aux_loss", "mtp_0", "mtp_1")}
            assert got == pytest.approx({key: losses[key] for key in got}, rel=1e-5), layout
