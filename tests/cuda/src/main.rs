//! The command line under another name, because cargo tells the tests of a package the paths of that
//! package's programs only.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    slabwise_cli::main()
}
