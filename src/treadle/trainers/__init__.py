"""Configurations of the trainers that people run, read into a Job and written from one.

job_description.py      what a file says, as fields of a Job, and what the estimate leaves out of it
launch_script.py        options of a launch script in bash
yaml_text.py            YAML and sections of settings
megatron_arguments.py   Megatron-LM's arguments, from a log, a script or MODEL_ARGS
megatron_effects.py     which of them touch a step or its memory
megatron_job.py         a job from them
megatron.py             a job as them, and what Megatron-LM refuses
bridge.py               Megatron-Bridge's entries for these arguments
pipelining_class.py     what trainers on torch.distributed.pipelining and FSDP run
automodel.py            NeMo AutoModel's YAML
titan.py                torchtitan's saved configuration and options
registry.py             the trainers, and a file as a job of one of them
"""

from treadle.trainers.job_description import ReadJob, Unread
from treadle.trainers.registry import TRAINERS, TrainerFormat, read_job, trainer

__all__ = ["TRAINERS", "ReadJob", "TrainerFormat", "Unread", "read_job", "trainer"]
