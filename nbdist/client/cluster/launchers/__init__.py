"""Ways to start engines. `local` is the first; each answers to `launchers.base.Launcher`."""
