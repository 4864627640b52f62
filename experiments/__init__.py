"""Programs over the library: run, report, configs."""
