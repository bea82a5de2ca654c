//! The packer from outside: random problems, brute force, and what the checker rejects.

mod alignments;
mod mutations;
mod oracle;
mod properties;
mod random_problem;
mod seeds;
