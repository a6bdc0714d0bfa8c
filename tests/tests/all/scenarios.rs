//! Runs every script in `scenarios/` and compares its trace with the snapshot.

#[test]
fn scenarios() {
    insta::glob!("../../scenarios", "*.txt", |path| {
        let script = std::fs::read_to_string(path).expect("the script is readable");
        let trace = terrace_tests::run(&script).unwrap_or_else(|error| panic!("{error}"));
        insta::assert_snapshot!(trace);
    });
}
