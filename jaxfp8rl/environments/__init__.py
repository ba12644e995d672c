"""Turns with environments and tools: the protocol, the processes in which environments run and can be killed,
and trajectories whose tokens are the ones that were sampled."""
