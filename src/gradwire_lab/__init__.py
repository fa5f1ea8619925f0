"""The lab beside the library: training, benchmarks, forecasts, network test beds, reports, commands."""
