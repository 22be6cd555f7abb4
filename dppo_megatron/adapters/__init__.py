"""The selection inside other trainers, one module each (docs/adapters.md). Their code is not patched."""
