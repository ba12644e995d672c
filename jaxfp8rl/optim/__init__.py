"""AdamW and the low-bit formats of masters and moments."""
