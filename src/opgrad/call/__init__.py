"""From a Python call to a plan: public functions, whose arrays these are, native calls. Imports `cuda` and below."""
