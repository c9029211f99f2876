"""The hot operations. Each one is a plain definition, and faster versions of the same function are tested against it."""
