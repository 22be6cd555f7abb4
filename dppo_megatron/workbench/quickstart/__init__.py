"""The task of `make quickstart`: arithmetic problems and a model of 100,000 parameters, both made here."""
