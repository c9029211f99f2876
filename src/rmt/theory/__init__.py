"""What can be known of a model before it is trained: its size and cost, how variance moves, how it should scale."""
