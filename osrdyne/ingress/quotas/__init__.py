"""Quotas: how much clients may send, when a quota will be used up, and which capacity a load needs. Pure."""
