"""Speculative decoding: proposers, verification and adaptive draft length."""
