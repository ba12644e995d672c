"""What a decoding step computes between its products, of a token a row: each part one kernel."""
