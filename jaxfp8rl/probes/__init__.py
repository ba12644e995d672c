"""Where FP8 loses precision, and where numbers stop being finite: by layer and linear."""
