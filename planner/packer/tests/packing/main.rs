//! The packer from outside: random problems, brute force, and packings that the checker rejects.

mod alignments;
mod extremes;
mod large;
mod mutations;
mod oracle;
mod properties;
mod random_problem;
mod seeds;
