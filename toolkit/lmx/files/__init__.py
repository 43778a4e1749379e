"""Files on disk: whole or absent, hashed, read with care."""
