//! Runs one hot path. `scripts/instructions` starts it under Callgrind, which counts instructions
//! inside [`counted`].
//!
//!     hot-path          prints the names of the paths
//!     hot-path NAME     runs this path

use terrace_bench::hot_paths::{HotPath, Visitor, visit_all};

fn main() {
    match std::env::args().nth(1) {
        None => visit_all(&mut Print),
        Some(name) => {
            let mut go = Go { name, gone: false };
            visit_all(&mut go);
            assert!(go.gone, "there is no path `{}`", go.name);
        }
    }
}

struct Print;

impl Visitor for Print {
    fn visit<P: HotPath>(&mut self, name: &str) {
        println!("{name}");
    }
}

struct Go {
    name: String,
    gone: bool,
}

impl Visitor for Go {
    fn visit<P: HotPath>(&mut self, name: &str) {
        if name == self.name {
            counted(&mut P::prepare());
            self.gone = true;
        }
    }
}

// Neither the preparation nor the drop of the path is counted.
#[inline(never)]
fn counted<P: HotPath>(path: &mut P) {
    path.run();
}
