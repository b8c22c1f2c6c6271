//! The owner.
