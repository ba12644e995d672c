"""Log-probabilities and entropy of a softmax over a large vocabulary, by products whose logits never reach
memory."""
