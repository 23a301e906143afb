//! Inputs that are deep, wide, repeated, aliased or long. They are generated, because they are too large for
//! `fuzz/seeds`.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};

/// Number of levels of a deep input.
const DEPTH: usize = 10_000;
/// Length of a long input, and of one that repeats a seed.
const LONG: usize = 128 << 10;
const REPEATED: usize = 32 << 10;

/// An input with its description.
pub(super) type Shape = (String, Vec<u8>);

/// Returns the inputs for a target, in each of its modes.
pub(super) fn of(target: &str, seeds: &[Vec<u8>]) -> Vec<Shape> {
    let mut shapes = Shapes::default();
    shapes.add_bytes();
    if ["access_log", "admin_call", "descriptor_text", "json_request", "override_journal", "resource_report"]
        .contains(&target)
    {
        shapes.add_json();
    }
    if ["check_frame", "check_request", "peer_message", "quota_reports", "recorded_traffic", "xds_resource"]
        .contains(&target)
    {
        shapes.add_protobuf();
    }
    if ["access_log", "rule_file", "settings_file", "statsd_mapping"].contains(&target) {
        shapes.add_yaml();
    }
    match target {
        "rule_file" => shapes.add_rules(),
        "statsd_mapping" => shapes.add_mappings(),
        "memcached_reply" => shapes.add_items(),
        "redis_reply" => shapes.add_replies(),
        _ => {}
    }
    let modes: &[&[u8]] = match target {
        "settings_file" => &[b"", b"#yaml\n"],
        "peer_message" => &[&[0], &[1], &[2]],
        "http2" => &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7]],
        "admin_call" => &[b"PutOverrides\n", b"Inspect\n", b"UploadCandidate\n", b"ReadDescriptors\n", b"Simulate\n"],
        "resource_report" => &[b"", b"db\n"],
        _ => &[b""],
    };
    let mut inputs = shapes.with_modes(modes);
    let mut other = Shapes::default();
    for (index, seed) in seeds.iter().enumerate() {
        if !seed.is_empty() {
            other.add(&format!("seed {index}, repeated"), seed.repeat((REPEATED / seed.len()).max(2)));
        }
    }
    match target {
        "access_log" => other.add_log_lines(),
        "admin_call" => other.add_admin_calls(),
        "activity_report" => other.add_reports(),
        "check_frame" => other.add_frames(),
        "check_request" => other.add_requests(),
        "descriptor_text" => other.add_texts(),
        "envoyproxy_environment" => other.add_variables(),
        "framed_message" => other.add_messages(),
        "http2" => {
            other.add_connections(1);
            other.add_connections(3);
        }
        "json_request" => other.add_json_requests(b""),
        "override_journal" => other.add_journals(),
        "peer_message" => other.add_peer_messages(),
        "quota_reports" => other.add_quota_reports(),
        "recorded_traffic" => other.add_recordings(),
        "wildcard" => other.add_patterns(),
        "xds_resource" => other.add_resources(),
        _ => {}
    }
    inputs.append(&mut other.0);
    inputs
}

#[derive(Default)]
struct Shapes(Vec<Shape>);

impl Shapes {
    fn add(&mut self, description: &str, input: impl Into<Vec<u8>>) {
        self.0.push((description.to_owned(), input.into()));
    }

    /// Returns each input after the bytes that select a mode of its target.
    fn with_modes(self, modes: &[&[u8]]) -> Vec<Shape> {
        let mut shapes = Vec::new();
        for mode in modes {
            for (description, input) in &self.0 {
                shapes.push((
                    format!("{description} after {:?}", mode.escape_ascii().to_string()),
                    [*mode, input].concat(),
                ));
            }
        }
        shapes
    }

    fn add_bytes(&mut self) {
        for byte in [b"\0", b"x", b"\n", b"=", b"%", b"\\", b"\x7f", b"\xff"] {
            self.add(&format!("long, of {:?}", byte.escape_ascii().to_string()), byte.repeat(LONG));
        }
        self.add("wide, words", "a=b ".repeat(LONG / 4));
        self.add("wide, lines", "a=b\n".repeat(LONG / 4));
        let lines: String = (0..LONG / 16).map(|number| format!("name{number}=value\n")).collect();
        self.add("wide, different lines", lines);
        self.add("wide, path", "a.".repeat(LONG / 2));
    }

    fn add_json(&mut self) {
        for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("{\"entries\":[", "]}")] {
            self.add(&format!("deep, {open} without ends"), open.repeat(DEPTH));
            self.add(&format!("deep, {open}"), format!("{}1{}", open.repeat(DEPTH), close.repeat(DEPTH)));
        }
        self.add("wide, list", format!("[{}1]", "1,".repeat(LONG / 2)));
        let names: String = (0..LONG / 10).map(|number| format!("\"{number}\":1,")).collect();
        self.add("wide, map", format!("{{{names}\"a\":1}}"));
        self.add("repeated, names", format!("{{{}\"a\":1}}", "\"a\":1,".repeat(LONG / 6)));
        self.add("long, string", format!("{{\"a\":\"{}\"}}", "\\n".repeat(LONG / 2)));
    }

    fn add_protobuf(&mut self) {
        for number in 1..8 {
            self.add(&format!("wide, empty fields {number}"), [number << 3 | 2, 0].repeat(LONG / 2));
            self.add(&format!("long, field {number}"), field(number, &b"x\xff".repeat(LONG / 2)));
            let mut message = Vec::new();
            for _ in 0..1_000 {
                message = field(number, &message);
            }
            self.add(&format!("deep, field {number}"), message);
        }
        self.add("deep, groups", [vec![0x7b; DEPTH], vec![0x7c; DEPTH]].concat());
        self.add("deep, groups without ends", vec![0x7b; LONG]);
    }

    fn add_yaml(&mut self) {
        for (open, close) in [("- ", ""), ("[", "]"), ("{a: ", "}"), ("? ", ""), ("a: [", "]")] {
            self.add(&format!("deep, {open}without ends"), open.repeat(DEPTH));
            self.add(&format!("deep, {open}"), format!("{}x{}", open.repeat(DEPTH), close.repeat(DEPTH)));
        }
        self.add("wide, list", "- a\n".repeat(LONG / 4));
        self.add("wide, flow list", format!("[{}]", "a,".repeat(LONG / 2)));
        let names: String = (0..LONG / 12).map(|number| format!("name{number}: a\n")).collect();
        self.add("wide, map", names);
        self.add("repeated, names", "a: b\n".repeat(LONG / 5));
        self.add("long, scalar", format!("a: '{}'\n", "x".repeat(LONG)));
        self.add("long, comment", format!("# {}\n", "x".repeat(LONG)));
        self.add("aliased, scalar", aliased_scalar(10_000, 1_000));
        self.add("aliased, scalar of a small file", aliased_scalar(30_000, 8_000));
        self.add("aliased, lists", aliased_lists(6));
        self.add("wide, anchors", "- &a x\n".repeat(LONG / 7));
    }

    fn add_rules(&mut self) {
        let domain = "domain: api\ndescriptors:\n";
        let values: String = (0..5_000)
            .map(|number| {
                format!("- {{key: user, value: u{number}, rate_limit: {{unit: day, requests_per_unit: 1}}}}\n")
            })
            .collect();
        self.add("wide, values", format!("{domain}{values}"));
        let patterns: String = (0..2_000)
            .map(|number| {
                format!("- {{key: user, value: '*u{number}*', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n")
            })
            .collect();
        self.add("wide, patterns", format!("{domain}{patterns}"));
        let rule = "- {key: user, value: bob, rate_limit: {unit: day, requests_per_unit: 1}}\n";
        self.add("repeated, rules", format!("{domain}{}", rule.repeat(2_000)));
        let nested = "descriptors: [{key: a, ".repeat(60);
        self.add("deep, descriptors", format!("domain: api\n{nested}value: b{}", "}]".repeat(60)));
        self.add("wide, mistakes", format!("{domain}{}", "- x\n".repeat(100_000)));
        self.add("wide, short mistakes", format!("domain: api\ndescriptors: [{}]", "a,".repeat(300_000)));
        self.add("wide, unknown keys", format!("domain: api\ndescriptors: [{{{}}}]", "?,".repeat(20_000)));
        let limit = "limits: [&limit {unit: day, requests_per_unit: 1}]\n";
        let aliases: String =
            (0..5_000).map(|number| format!("- {{key: user, value: u{number}, rate_limit: *limit}}\n")).collect();
        self.add("aliased, limits", format!("{limit}{domain}{aliases}"));
        self.add("aliased, many limits", aliased_descriptors(12));
        self.add("aliased, too many limits", aliased_descriptors(18));
        let mistakes = "x, ".repeat(1_000);
        let aliases = "{key: k, descriptors: *bad}, ".repeat(300);
        self.add(
            "aliased, mistakes",
            format!("bad: &bad [{mistakes}]\n{domain}- {{key: a, descriptors: [{aliases}]}}\n"),
        );
        let long = format!("&a {}", "x".repeat(10_000));
        let aliases = "- {key: *a, value: *a}\n".repeat(1_000);
        self.add("aliased, names", format!("domain: {long}\ndescriptors:\n{aliases}"));
    }

    fn add_mappings(&mut self) {
        let entry = "- {match: 'a.*.b', name: x, labels: {a: $1}}\n";
        self.add("wide, mappings", format!("mappings:\n{}", entry.repeat(3_000)));
        let entry = "- {match: '.*(a+)+', match_type: regex, name: x}\n";
        self.add("wide, expressions", format!("mappings:\n{}", entry.repeat(200)));
        let expression = format!("{}a{}", "(".repeat(DEPTH), ")".repeat(DEPTH));
        self.add("deep, expression", format!("mappings:\n- {{match: '{expression}', match_type: regex, name: x}}\n"));
        self.add("repeated, expression", "mappings:\n- {match: '((a{100}){100}){100}', match_type: regex, name: x}\n");
        let labels: String = (0..2_000).map(|number| format!("l{number}: $0, ")).collect();
        self.add("wide, labels", format!("mappings:\n- {{match: '*', name: x, labels: {{{labels}}}}}\n"));
        let template = "$0".repeat(LONG / 2);
        self.add("repeated, references", format!("mappings:\n- {{match: '*', name: '{template}'}}\n"));
        let template = "$1".repeat(LONG / 2);
        let entry = format!("- {{match: '(.*)', match_type: regex, name: '{template}'}}\n");
        self.add("repeated, captured parts", format!("mappings:\n{entry}"));
    }

    fn add_replies(&mut self) {
        self.add("deep, lists", "*1\r\n".repeat(DEPTH));
        self.add("deep, lists with end", format!("{}:1\r\n", "*1\r\n".repeat(100)));
        self.add("wide, numbers", format!("*{}\r\n{}", LONG / 4, ":1\r\n".repeat(LONG / 4)));
        self.add("wide, empty lists", format!("*{}\r\n{}", LONG / 4, "*0\r\n".repeat(LONG / 4)));
        self.add("wide, announced only", "*2147483647\r\n");
        self.add("long, announced only", "$536870912\r\nx");
        self.add("deep, announced only", "*1000000\r\n".repeat(100));
        let text = "x".repeat(LONG);
        self.add("long, text", format!("${LONG}\r\n{text}\r\n"));
    }

    fn add_items(&mut self) {
        self.add("wide, no items", "EN\r\n".repeat(LONG / 4));
        self.add("wide, items", "VA 8 c1\r\n\0\0\0\0\0\0\0\0\r\n".repeat(LONG / 19));
        self.add("wide, errors", "SERVER_ERROR x\r\n".repeat(LONG / 16));
        self.add("long, announced only", "VA 8388608 c1\r\nx");
        self.add("long, too long", "VA 8388609 c1\r\nx");
        self.add("long, item", format!("VA {LONG} c1\r\n{}\r\n", "x".repeat(LONG)));
        self.add("long, line", "VA ".repeat(LONG));
    }

    fn add_log_lines(&mut self) {
        let mapping = |descriptor: &str| {
            format!("domain: api\ntime: time\ndescriptors:\n{}", format!("- [{descriptor}]\n").repeat(64))
        };
        let entries = "{key: user, field: user}, ".repeat(31);
        let same = mapping(&format!("{entries}{{key: user, field: user}}"));
        let incomplete = mapping(&format!("{entries}{{key: user, field: none}}"));
        let alias = |entries: usize, descriptors: usize| {
            let more = "*e, ".repeat(entries - 1);
            let descriptors = "- *d\n".repeat(descriptors - 1);
            format!("domain: api\ntime: time\ndescriptors:\n- &d [&e {{key: u, field: user}}, {more}]\n{descriptors}")
        };
        let text = format!("\"{}\"", "x".repeat(20_000));
        let list = format!("[{}1]", "1,".repeat(20_000));
        for (mapping_shape, mapping) in [
            ("repeated", &same),
            ("incomplete", &incomplete),
            ("aliased", &alias(32, 128)),
            ("aliased, too wide", &alias(32, 150)),
            ("aliased, much too wide", &alias(32, 400)),
            ("aliased, too many", &alias(200, 60)),
        ] {
            for (value_shape, value) in [("short text", "\"bob\""), ("long text", &text), ("wide list", &list)] {
                let line = format!("{{\"time\": 1, \"user\": {value}}}\n");
                let lines = if line.len() < 100 { line.repeat(100) } else { line };
                self.add(&format!("{mapping_shape} entries, {value_shape}"), format!("{mapping}\n---\n{lines}"));
            }
        }
        let mut yaml = Self::default();
        yaml.add_yaml();
        for (description, mapping) in yaml.0 {
            self.add(&format!("{description}, as mapping"), [&mapping[..], b"\n---\n{}\n"].concat());
        }
        let fields: String = (0..5_000).map(|number| format!("\"f{number}\": {number}, ")).collect();
        self.add("wide, fields", format!("{{{fields}\"time\": 1, \"user\": \"bob\"}}"));
    }

    fn add_reports(&mut self) {
        let report = |steps: &str| {
            let period = "[1,1,1,1,1,1,1,1,1,1,[1,1,1],[],[1,1]]";
            gzip(format!(r#"[["a","1",1],1,[{steps}{period}],{period}]"#).as_bytes())
        };
        self.add("wide, compressed periods", report(&"[1,1,1,1,1,1,1,1,1,1,[1,1,1],[],[1,1]],".repeat(25_000)));
        let classes = r#"["",0,0],"#.repeat(100_000);
        let period = format!(r#"[1,1,1,1,1,1,1,1,1,1,[1,1,1],[{}],[1,1]],"#, classes.trim_end_matches(','));
        self.add("wide, compressed classes", report(&period));
        self.add("too wide, compressed periods", gzip("[[\"a\",\"1\",1],1,[".repeat(100_000).as_bytes()));
        self.add("long, compressed", gzip(&vec![b' '; 8 << 20]));
        self.add("deep, compressed", gzip("[".repeat(DEPTH).as_bytes()));
        self.add("repeated, compressed parts", gzip(b"").repeat(1_000));
    }

    fn add_requests(&mut self) {
        let entry = field(1, &[field(1, b"user"), field(2, b"bob")].concat());
        let domain = field(1, b"api");
        self.add("wide, entries", [domain.clone(), field(2, &entry.repeat(32)).repeat(128)].concat());
        self.add("too wide, descriptors", [domain.clone(), field(2, &entry).repeat(10_000)].concat());
        self.add("too wide, entries", [domain.clone(), field(2, &entry.repeat(10_000))].concat());
        let rules =
            ["user", "fixed", "window", "log", "warm", "gcra", "queue", "slots", "adaptive", "report", "address"];
        let descriptors = rules.map(|key| field(2, &field(1, &[field(1, key.as_bytes()), field(2, b"bob")].concat())));
        self.add("repeated, descriptors", [domain.clone(), descriptors.concat().repeat(11)].concat());
        let long = field(1, &[field(1, b"fixed"), field(2, &b"\xff\\x".repeat(40_000))].concat());
        self.add("long, value", [domain.clone(), field(2, &long)].concat());
        self.add("long, values", [domain.clone(), field(2, &long).repeat(8)].concat());
        self.add("long, domain", [field(1, &b"x".repeat(LONG)), field(2, &entry)].concat());
        self.add("repeated, domain", [field(1, &b"x".repeat(1_000)).repeat(100), field(2, &entry)].concat());
        self.add(
            "repeated, limit",
            [domain, field(2, &[entry, field(2, &[8, 1, 16, 1]).repeat(5_000)].concat())].concat(),
        );
    }

    fn add_frames(&mut self) {
        let entry = field(1, &[field(1, b"fixed"), field(2, b"bob")].concat());
        let request = [field(1, b"api"), field(2, &entry)].concat();
        let check = |id: u8| field(1, &[vec![8, id & 0x7f], field(2, &request)].concat());
        self.add("repeated, checks", check(1).repeat(3_000));
        self.add("wide, empty checks", [0x0a, 0].repeat(65_000));
        self.add("too wide, empty checks", [0x0a, 0].repeat(200_000));
        self.add("wide, feedback", field(4, &[8, 1]).repeat(20_000));
        let wide = [field(1, b"api"), field(2, &entry).repeat(128)].concat();
        self.add("wide, descriptors", field(1, &[vec![8, 1], field(2, &wide)].concat()).repeat(30));
        let value = field(1, &[field(1, b"fixed"), field(2, &b"\xff".repeat(LONG))].concat());
        let long = [field(1, b"api"), field(2, &value)].concat();
        self.add("long, value", field(1, &[vec![8, 1], field(2, &long)].concat()));
        let feedback = field(4, &[8, 3, 0x12, 2, b'1', b'2', 0x18, 2]);
        self.add("repeated, feedback", [feedback.repeat(10_000), check(2)].concat());
        let trace = field(3, b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        self.add("repeated, trace", field(1, &[vec![8, 1], field(2, &request), trace.repeat(1_000)].concat()));
    }

    fn add_quota_reports(&mut self) {
        let usage = |key: &str, value: &[u8]| {
            let name = field(1, &[field(1, key.as_bytes()), field(2, value)].concat());
            field(2, &[field(1, &name), vec![3 << 3, 1]].concat())
        };
        let domain = field(1, b"api");
        self.add("repeated, buckets", [domain.clone(), usage("user", b"bob").repeat(5_000)].concat());
        let buckets: Vec<u8> = (0..5_000).flat_map(|number| usage("fixed", format!("u{number}").as_bytes())).collect();
        self.add("wide, buckets", [domain.clone(), buckets].concat());
        self.add("long, value", [domain.clone(), usage("fixed", &b"\xff".repeat(LONG))].concat());
        self.add("wide, long values", [domain.clone(), usage("fixed", &b"x".repeat(1_000)).repeat(200)].concat());
        let entry = field(1, &[field(1, b"a"), field(2, b"b")].concat());
        self.add("too wide, entries", [domain.clone(), field(2, &field(1, &entry.repeat(10_000)))].concat());
        self.add("repeated, names", [domain, field(2, &field(1, &entry.repeat(10)).repeat(1_000))].concat());
    }

    fn add_resources(&mut self) {
        let limit = field(3, &[8, 1, 16, 2]);
        let descriptor = field(3, &[field(1, b"user"), field(2, b"bob"), limit.clone()].concat());
        let config = |rest: Vec<u8>| [field(1, b"api"), field(2, b"api"), rest].concat();
        self.add("repeated, descriptors", config(descriptor.repeat(3_000)));
        let descriptors: Vec<u8> = (0..3_000)
            .flat_map(|number| {
                field(3, &[field(1, b"user"), field(2, format!("u{number}").as_bytes()), limit.clone()].concat())
            })
            .collect();
        self.add("wide, descriptors", config(descriptors));
        let mut deep = Vec::new();
        for _ in 0..90 {
            deep = [field(1, b"a"), field(4, &deep)].concat();
        }
        self.add("deep, descriptors", config(field(3, &deep)));
        self.add("wide, mistakes", config([0x1a, 0].repeat(50_000)));
    }

    fn add_peer_messages(&mut self) {
        for (kind, number) in [(0, 6), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)] {
            let items = [number << 3 | 2, 0].repeat(1 << 20);
            self.add(&format!("too wide, fields {number} of kind {kind}"), [vec![kind], items].concat());
        }
        let increment = |contents: &[u8]| [vec![0], field(6, contents)].concat();
        self.add("too wide, limits", increment(&[3 << 3 | 2, 0].repeat(400_000)));
        self.add("wide, limits", increment(&[3 << 3 | 2, 0].repeat(190_000)));
        let changes = [field(4, &[7; 11 * 20_000]), field(6, &[2; 20_000]), field(7, &[1; 20_000])].concat();
        let limit = field(3, &[field(1, b"fixed_window"), vec![16, 10, 24, 192, 132, 61]].concat());
        self.add("repeated, changes", increment(&[limit.clone(), changes].concat()));
        let resets = field(8, &[7; 11 * 1_000]);
        self.add("repeated, resets", [vec![0], field(6, &resets).repeat(100)].concat());
        let copy = field(3, &[field(1, &[7; 11]), field(2, &[1; 20]), vec![24, 255, 255, 255, 255, 7]].concat());
        self.add("repeated, copies", [vec![1], copy.repeat(19_000)].concat());
        let copy = field(3, &[field(1, &[7; 11]), field(2, &[1; 60_000]), vec![24, 255, 255, 255, 255, 7]].concat());
        self.add("long, states", [vec![1], copy.repeat(20)].concat());
        let change = field(2, &[4 << 3 | 2, 0].repeat(15_000));
        self.add("too wide, changes of changes", [vec![2], change.repeat(50)].concat());
        self.add("wide, changes of changes", [vec![2], field(2, &[4 << 3 | 2, 0].repeat(19)).repeat(990)].concat());
    }

    fn add_recordings(&mut self) {
        let with_length = |message: &[u8]| field(1, message)[1..].to_vec();
        let entry = field(1, &[field(1, b"user"), field(2, b"bob")].concat());
        let request = [vec![8, 1], field(3, b"api"), field(4, &entry)].concat();
        self.add("repeated, requests", with_length(&request).repeat(1_000));
        self.add("repeated, compressed requests", gzip(&with_length(&request).repeat(10_000)));
        self.add("repeated, compressed files", gzip(&with_length(&request)).repeat(200));
        let wide = [vec![8, 1], field(3, b"api"), [4 << 3 | 2, 0].repeat(500_000)].concat();
        self.add("wide, descriptors", with_length(&wide));
        self.add("wide, compressed descriptors", gzip(&with_length(&wide)));
        let wide = [vec![8, 1], field(3, b"api"), field(4, &[1 << 3 | 2, 0].repeat(500_000))].concat();
        self.add("wide, entries", with_length(&wide));
        self.add("wide, compressed entries", gzip(&with_length(&wide)));
        self.add("long, compressed", gzip(&with_length(&vec![0x78; 8 << 20])));
        self.add("long, announced only", [0xff, 0xff, 0xff, 0x07]);
        let long = field(1, &[field(1, b"user"), field(2, &b"x".repeat(LONG))].concat());
        self.add("long, value", with_length(&[field(3, b"api"), field(4, &long)].concat()));
    }

    fn add_texts(&mut self) {
        self.add("wide, entries", format!("api {}", "user=bob ".repeat(LONG / 9)));
        self.add("repeated, quotes", format!("api {}", "a=''".repeat(LONG / 4)));
        self.add("long, quoted", format!("api user='{}'", "x".repeat(LONG)));
        let descriptor = r#"{"entries":[{"key":"a"}]},"#;
        self.add(
            "wide, descriptors",
            format!(r#"{{"domain":"api","descriptors":[{}{{"entries":[]}}]}}"#, descriptor.repeat(5_000)),
        );
        self.add("wide, options", format!("curl {} -d '{{}}'", "-H x ".repeat(LONG / 5)));
        self.add("repeated, bodies", format!("curl {}", "-d '{}' ".repeat(LONG / 8)));
        let domain = "x".repeat(LONG);
        let descriptors = descriptor.repeat(99);
        self.add(
            "repeated, long domain",
            format!(r#"{{"domain":"{domain}","descriptors":[{descriptors}{{"entries":[{{"key":"a"}}]}}]}}"#),
        );
        self.add(
            "too often, long domain",
            format!(
                r#"{{"domain":"{domain}","descriptors":[{}{{"entries":[{{"key":"a"}}]}}]}}"#,
                descriptor.repeat(1_000)
            ),
        );
    }

    fn add_json_requests(&mut self, mode: &[u8]) {
        let entry = r#"{"key":"user","value":"bob"},"#.repeat(31);
        let descriptor = format!(r#"{{"entries":[{entry}{{"key":"a","value":"b"}}]}},"#);
        let body = |descriptors: &str| {
            let text = format!(r#"{{"domain":"api","descriptors":[{}]}}"#, descriptors.trim_end_matches(','));
            [mode, text.as_bytes()].concat()
        };
        self.add("wide, entries", body(&descriptor.repeat(128)));
        self.add("too wide, descriptors", body(&"{},".repeat(19_000)));
        self.add("much too wide, descriptors", body(&"{},".repeat(200_000)));
        let long = format!(r#"{{"entries":[{{"key":"user","value":"{}"}}]}}"#, "\\ud800".repeat(LONG / 6));
        self.add("long, value", body(&long));
        self.add("too long, value", body(&"x".repeat(5 << 20)));
    }

    fn add_admin_calls(&mut self) {
        let call = |method: &str, list: &str, item: &str, count: usize| {
            let items = vec![item; count].join(",");
            format!("{method}\n{{\"{list}\":[{items}],\"reason\":\"x\"}}")
        };
        let change =
            r#"{"target":{"limit":{"domain":"api","entries":[{"key":"user","value":"bob"}]}},"value":"1/day"}"#;
        self.add("repeated, changes", call("PutOverrides", "changes", change, 100));
        self.add("too wide, changes", call("PutOverrides", "changes", change, 1_000));
        self.add("wide, empty changes", call("PutOverrides", "changes", "{}", 40_000));
        let entries = vec![r#"{"key":"a"}"#; 10_000].join(",");
        self.add(
            "wide, entries",
            format!("Inspect\n{{\"descriptor\":{{\"domain\":\"api\",\"entries\":[{entries}]}}}}"),
        );
        let text = "user=bob ".repeat(10_000);
        self.add("wide, text", format!("ReadDescriptors\n{{\"text\":\"api {text}\"}}"));
        let rules = "- {key: user, value: bob, rate_limit: {unit: day, requests_per_unit: 1}}\\n".repeat(1_000);
        self.add(
            "repeated, rules",
            format!(
                "UploadCandidate\n{{\"files\":[{{\"name\":\"a\",\"text\":\"domain: api\\ndescriptors:\\n{rules}\"}}]}}"
            ),
        );
    }

    fn add_variables(&mut self) {
        let servers: String = (0..5_000).map(|number| format!("h{number}:1,")).collect();
        self.add("wide, servers", format!("REDIS_TYPE=CLUSTER\nREDIS_URL={}\n", servers.trim_end_matches(',')));
        self.add("wide, tags", format!("USE_STATSD=true\nEXTRA_TAGS={}a:b\n", "a:b,".repeat(LONG / 4)));
        self.add("long, value", format!("REDIS_AUTH={}\n", "x".repeat(LONG)));
    }

    fn add_journals(&mut self) {
        let kept = |number: usize, version: usize| {
            let entry = r#"{\"w\": \"10/minute\", \"a\": \"bob\", \"t\": 1763672400000000}"#;
            format!("{{\"kept\": [\"limit|api|user=u{number}\", {version}, \"{entry}\"]}}\n")
        };
        self.add("wide, overrides", (0..1_000).map(|number| kept(number, number)).collect::<String>());
        self.add("repeated, overrides", kept(1, 1).repeat(1_000));
        let past = r#"{"past": {"version": 4, "id": "a", "info": "{}", "changes": []}}"#;
        self.add("repeated, changes", format!("{past}\n").repeat(1_500));
        self.add("long, line", format!("{{\"kept\": [\"{}\", 1, \"\"]}}\n", "x".repeat(LONG)));
    }

    fn add_patterns(&mut self) {
        self.add("repeated, stars", format!("{}\n{}", "a".repeat(1_000), "*a".repeat(LONG / 2)));
        self.add("long, value", format!("{}\n{}", "a".repeat(LONG), "*aaab*\n".repeat(64)));
        self.add("wide, lengths", {
            let patterns: String = (0..64).map(|length| format!("{}*\n", "a".repeat(length))).collect();
            format!("{}\n{patterns}", "a".repeat(LONG))
        });
    }

    fn add_messages(&mut self) {
        for (kind, message) in messages() {
            self.add(kind, message);
        }
    }

    fn add_connections(&mut self, selector: u8) {
        let start = [vec![selector], frame(4, 0, 0, &[])].concat();
        let check = headers("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
        let stream = headers("/sluicegate.v1.DecisionService/Stream");
        let quotas = headers("/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas");
        let reflection = headers("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
        for (name, head, count) in [
            ("checks", &check, 1_000),
            ("streams", &stream, 1_000),
            ("quotas", &quotas, 1_000),
            ("reflection", &reflection, 500),
        ] {
            let mut bytes = start.clone();
            for number in 0..count {
                let id = 2 * number + 1;
                bytes.extend(frame(1, 4, id, head));
                bytes.extend(frame(0, 0, id, &[&[0, 0, 3, 0, 0][..], &[0x7a; 16_000]].concat()));
            }
            self.add(&format!("wide, unfinished messages of {name}"), bytes);
        }
        for (name, head) in [("check", &check), ("stream", &stream), ("quotas", &quotas)] {
            for (kind, data) in messages() {
                let mut bytes = [start.clone(), frame(1, 4, 1, head)].concat();
                for part in data.chunks(16_000) {
                    bytes.extend(frame(0, 0, 1, part));
                }
                bytes.extend(frame(0, 1, 1, &[]));
                self.add(&format!("compressed {name}, {kind}"), bytes);
            }
        }
        let mut bytes = start.clone();
        for number in 0..500 {
            bytes.extend(frame(1, 5, 2 * number + 1, &check));
        }
        self.add("repeated, calls without a message", bytes);
        self.add("repeated, pings", [start.clone(), frame(6, 0, 0, &[0; 8]).repeat(8_000)].concat());
        self.add("repeated, settings", [start.clone(), frame(4, 0, 0, &[0, 4, 0, 0, 255, 255]).repeat(5_000)].concat());
        let opened = [frame(1, 4, 1, &check), frame(0, 0, 1, &[]).repeat(10_000)].concat();
        self.add("repeated, empty data", [start.clone(), opened].concat());
        let more = frame(9, 0, 1, &[0x7f; 16_000]).repeat(50);
        self.add("repeated, continuations", [start.clone(), frame(1, 0, 1, &check), more].concat());
        // One field of 4,000 bytes enters the table of the connection, and each further byte refers to it.
        let name = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'y'; 4_000]].concat();
        let aliases = [check.clone(), name, vec![0xbe; 12_000]].concat();
        self.add("aliased, headers", [start.clone(), frame(1, 5, 1, &aliases)].concat());
        let mut bytes = start;
        for number in 0..2_000 {
            bytes.extend(frame(1, 4, 2 * number + 1, &check));
            bytes.extend(frame(3, 0, 2 * number + 1, &[0, 0, 0, 8]));
        }
        self.add("repeated, resets", bytes);
    }
}

/// Returns lists of ten aliases each to the list before, which have ten to the power of `levels` values.
fn aliased_lists(levels: usize) -> String {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..levels {
        let alias = format!("*a{}, ", level - 1).repeat(10);
        text += &format!("a{level}: &a{level} [{alias}]\n");
    }
    text
}

/// Returns a rule file with two to the power of `levels` rules.
fn aliased_descriptors(levels: usize) -> String {
    let mut text = String::from("domain: api\na0: &a0 [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]\n");
    for level in 1..=levels {
        let before = level - 1;
        let descriptors = format!("{{key: x, descriptors: *a{before}}}, {{key: y, descriptors: *a{before}}}");
        text += &format!("a{level}: &a{level} [{descriptors}]\n");
    }
    format!("{text}descriptors: *a{levels}\n")
}

fn aliased_scalar(length: usize, count: usize) -> String {
    format!("a: &a {}\nb: [{}]\n", "x".repeat(length), "*a, ".repeat(count))
}

fn varint(mut value: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Returns a field of protobuf with contents.
fn field(number: u8, contents: &[u8]) -> Vec<u8> {
    [vec![number << 3 | 2], varint(contents.len()), contents.to_vec()].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns compressed messages of gRPC with their prefix.
fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let mut messages = Vec::new();
    for (kind, data) in [
        ("compressed, announced 1 GiB", with_size(gzip(b"x"), 1 << 30)),
        ("compressed, announced 1 MiB", with_size(gzip(b"x"), 1 << 20)),
        ("compressed, announced 100 KiB of 8 MiB", with_size(gzip(&vec![0; 8 << 20]), 100 << 10)),
        ("compressed, too large", gzip(&vec![0; 8 << 20])),
        ("compressed, repeated bytes", gzip(&vec![0x7b; 200 << 10])),
        ("compressed, repeated checks", gzip(&[field(1, b"api"), [0x12, 0].repeat(100_000)].concat())),
        ("compressed, repeated parts", gzip(b"").repeat(1_000)),
    ] {
        let length = (data.len() as u32).to_be_bytes();
        messages.push((kind, [&[1][..], &length, &data].concat()));
    }
    messages
}

/// Returns compressed data that announces another size.
fn with_size(mut data: Vec<u8>, size: u32) -> Vec<u8> {
    let length = data.len();
    data[length - 4..].copy_from_slice(&size.to_le_bytes());
    data
}

/// Returns a frame of HTTP/2 (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the header block of a call of gRPC, without compression (RFC 7541, section 6.2.2).
fn headers(path: &str) -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
    ];
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            block.push(text.len() as u8);
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}
