"""What both strategies do alike: following the Trainer's loop, agreeing on outcomes, folders, norms, spelling."""
