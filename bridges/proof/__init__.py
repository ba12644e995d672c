"""How a weight sync is proven: manifests of its tensors, and digests of their bytes."""
