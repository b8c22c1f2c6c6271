//! The backend's tests that move data. They run on each engine and with each mover.

mod exactness;
mod hostile;
mod lifecycle;
mod model;
mod served;
mod shapes;
