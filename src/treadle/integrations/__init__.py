"""What runs inside other trainers, a module for each: `torch_pipelining` in torch.distributed.pipelining's runtime."""
