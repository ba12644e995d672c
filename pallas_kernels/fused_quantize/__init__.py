"""RMSNorm, SwiGLU and its backward pass with FP8 codes as output: quantisation fused into the producer of an
activation."""
