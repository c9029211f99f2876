"""The hot operations: each one a plain definition, and faster versions of the same function tested against it."""
