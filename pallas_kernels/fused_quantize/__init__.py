"""RMSNorm, SwiGLU and its backward that leave FP8 codes: quantisation where the activation is produced."""
