"""The one policy that computes and is published: its shape, its weights, routing replay, and its hardware."""
