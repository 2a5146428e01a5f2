"""Names the files in a run's folder."""

PLAN = "plan.toml"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
"""Names in a run's folder: its plan, its final weights, and its checkpoints unless the plan names another folder for them."""

COPIES = {
    ("data", "tokenizer"): "tokenizer",
    ("data", "template"): "tokenizer/chat_template.jinja",
    ("model", "weights"): "start",
    ("model", "config"): "start",
}
"""Keys of the plan that name files, and the folder or file within the run's own where a run keeps copies of the small ones."""
