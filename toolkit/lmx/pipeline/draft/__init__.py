"""The draft stage."""
