"""Parts of both strategies: following the Trainer's loop, agreeing on outcomes, folders, norms, spelling."""
