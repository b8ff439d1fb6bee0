"""Models in the shape people use, in segments, and Hugging Face's checkpoints of them both ways.

config = ModelConfig.from_hf("checkpoints/qwen3-moe")
stages = build_stages(config, ("Ett", "ttL"), {0: pp_rank})
load_pretrained(stages, "checkpoints/qwen3-moe")
pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn)

A tensor has one name, that of Hugging Face's file, whatever the cut. A `NamedView` maps it to this rank's parameters;
a fused expert weight is several views of one parameter. Loading, saving, the optimizer's shards, checkpoints and
weight updates go by views, so none of them knows about stages, chunks or expert groups. Initial values are drawn from
(seed, name), the same on every layout. The shared expert runs in `mlp`, so that the dispatch leaves before it. An MTP
block's layer is dense: blocks run on the compute lane and may not exchange tokens.
"""

from treadle.host.extras import brought_by

with brought_by("train", needed_by="treadle.models"):
    from treadle.models.balancing import update_bias
    from treadle.models.build_stages import build_stages
    from treadle.models.cut_stage import LMStage
    from treadle.models.cut_transformers import cut_causal_lm, cut_ties
    from treadle.models.document_lengths import Documents
    from treadle.models.ends import IGNORED, loss_fn
    from treadle.models.forward import run_stage
    from treadle.models.load_checkpoint import load_pretrained
    from treadle.models.model_config import ModelConfig
    from treadle.models.saving import save_pretrained
    from treadle.models.tensor_names import tied_parameters, views, views_of_stages
    from treadle.models.views import NamedView

__all__ = [
    "IGNORED",
    "Documents",
    "LMStage",
    "ModelConfig",
    "NamedView",
    "build_stages",
    "cut_causal_lm",
    "cut_ties",
    "load_pretrained",
    "loss_fn",
    "run_stage",
    "save_pretrained",
    "tied_parameters",
    "update_bias",
    "views",
    "views_of_stages",
]
