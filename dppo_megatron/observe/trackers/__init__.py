"""W&B, TensorBoard, MLflow and trackio behind one sink. Each tool runs in a process of its own."""
