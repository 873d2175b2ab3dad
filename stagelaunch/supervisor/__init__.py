"""The process that owns a deployment: admits, spawns, watches, stops. Performs what ``core.launch`` decides."""
