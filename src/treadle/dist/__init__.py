"""The layer over torch.distributed: devices, groups, channels, a rank's position in the mesh, one clock."""
