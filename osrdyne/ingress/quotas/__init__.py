"""Quotas: how much clients may send, when a quota gives out, and which capacity a load needs. Pure."""
