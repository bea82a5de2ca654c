//! The planner from the outside: dags in, checked plans out.

mod dags;
mod extremes;
mod generate;
mod judge;
mod mutations;
mod offload;
mod order;
mod overlap;
mod properties;
mod remat;
mod remat_graph;
mod repeats;
mod training_steps;
