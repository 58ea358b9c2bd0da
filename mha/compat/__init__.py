"""Adapters: the names, argument orders and mask meanings of other programs, computed here."""
