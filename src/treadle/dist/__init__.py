"""What torch.distributed is used for: devices, groups, channels, a rank's position in the mesh, one clock."""
