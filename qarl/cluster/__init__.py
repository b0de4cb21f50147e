"""Past one process: the only room that knows Ray and torch.distributed's process groups."""
