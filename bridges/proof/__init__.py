"""Proof of a weight sync: manifests of its tensors, and digests of their bytes."""
