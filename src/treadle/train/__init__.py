"""A trainer on a Pipeline: data, sharded optimizer, checkpoints, restarts, a line a step.

    torchrun --nproc-per-node 4 -m treadle.train --config configs/moe_tiny.toml --parallel.pp 2 --parallel.ep 2

`treadle.train.trainer.Trainer` runs a `treadle.train.config.TrainConfig`. By file, in the order of a run:

    command, reading, config, checking    the command line and TOML to a TrainConfig
    launch, parallel                      the processes that torchrun started; how model and batch fall on them
    data                                  text to tokens to samples to a replica's batches
    trainer                               makes all of it, and runs the steps
    optim, checkpoint                     the sharded optimizer; saving and loading
    metrics, probe, nonfinite, stopping   the line a step; what is not finite; SIGTERM
"""
