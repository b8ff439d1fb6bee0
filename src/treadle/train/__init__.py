"""A trainer on a Pipeline: data, sharded optimizer, checkpoints, restarts, a line a step.

    torchrun --nproc-per-node 4 -m treadle.train --config configs/moe_tiny.toml --parallel.pp 2 --parallel.ep 2

`treadle.train.trainer.Trainer` runs a `treadle.train.run_config.TrainConfig`. By file, in the order of a run:

    main, command, config_reading,
    run_config, checking                  the command line and TOML to a TrainConfig
    world, parallel                       the processes that torchrun started; how model and batch fall on them
    data                                  text to tokens to samples to a replica's batches
    trainer                               makes all of it, and runs the steps
    optim, checkpoint                     the sharded optimizer; saving and loading
    run_log, probe, nonfinite, stopping   the line a step; what is not finite; SIGTERM

The batch of a step is defined by its number and the seed alone. Side values (positions, documents) are given to every
rank and read by name. The main loss is a sum over tokens divided by their number; auxiliary losses are means over a
micro-batch's tokens, averaged over micro-batches.

The optimizer divides what ranks hold in common; torch's own AdamW and Muon do the arithmetic on flat float32 pieces.
Checkpoints are torch.distributed.checkpoint with planners of our own: parts of tensors under global names, so another
layout reads the parts it needs. A save is copied before it returns, written by a thread, renamed when it is whole,
with a digest of every file; a resume checks all of them and skips a checkpoint that is damaged. A PrefixStore with the
number of the restart keeps the addresses of dead processes apart.
"""
