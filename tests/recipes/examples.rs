//! Rule files of `deploy/examples` that a page of the book explains. Each is served alone and unchanged, with counters
//! in memory and in Redis.

use std::fs;

use super::{
    country_database::country_database,
    page::{code, rule_files, start_envoy_of},
};
use crate::support::{
    Operator, RedisServer, Server, descriptor,
    raw_client::{Answer, Client, Descriptor, ExactStatus, Request},
    repository, rules,
    server::post,
    wait_for_async,
};

/// The entries of one descriptor.
type Entries<'e> = &'e [(&'e str, &'e str)];

/// A service with the rules of one example.
struct Service {
    store: &'static str,
    domain: &'static str,
    operator: Operator,
    client: Client,
    _rules: tempfile::TempDir,
}

impl Service {
    /// Starts the service with `deploy/examples/DOMAIN.yaml`.
    async fn start(domain: &'static str, store: &'static str, url: &str) -> Self {
        let text = fs::read_to_string(repository(&format!("deploy/examples/{domain}.yaml"))).unwrap();
        let rules = rules(&[("rules.yaml", &text)]);
        let builder = Server::builder().rules(rules.path()).store(url).set("response.dynamic_metadata", "true");
        let operator = Operator::with(builder);
        let client = operator.server.client().await;
        Self { store, domain, operator, client, _rules: rules }
    }

    async fn check(&self, descriptors: Vec<Descriptor>) -> Answer {
        let mut request = Request::new(self.domain);
        for descriptor in descriptors {
            request = request.descriptor(descriptor);
        }
        self.client.check(request).await.unwrap()
    }

    /// Returns whether a request with these descriptors is allowed.
    async fn allows(&self, descriptors: &[Entries<'_>]) -> bool {
        self.check(descriptors.iter().map(|entries| descriptor(entries)).collect()).await.allowed()
    }

    /// Sends this number of equal requests and returns how many are allowed.
    async fn count_allowed(&self, requests: usize, descriptors: &[Entries<'_>]) -> usize {
        let mut allowed = 0;
        for _ in 0..requests {
            if self.allows(descriptors).await {
                allowed += 1;
            }
        }
        allowed
    }

    /// Returns whether any limit applies to a descriptor.
    async fn has_limit(&self, entries: Entries<'_>) -> bool {
        let answer = self.check(vec![descriptor(entries)]).await;
        answer.0.statuses[0].current_limit.is_some()
    }
}

/// The service with the rules of one example, once for each store.
struct Services {
    each: [Service; 2],
    _redis: RedisServer,
}

impl Services {
    async fn start(domain: &'static str) -> Self {
        let redis = RedisServer::start();
        let in_memory = Service::start(domain, "memory", "memory").await;
        let in_redis = Service::start(domain, "redis", &redis.url()).await;
        Self { each: [in_memory, in_redis], _redis: redis }
    }
}

/// A session of a user at an address.
struct Login {
    user: &'static str,
    session: &'static str,
    address: &'static str,
}

impl Login {
    fn descriptors(&self) -> Vec<Descriptor> {
        let user = descriptor(&[("user", self.user), ("session", self.session)]);
        let address = descriptor(&[("remote_address", self.address), ("session", self.session)]);
        vec![user, address]
    }

    async fn is_allowed(&self, service: &Service) -> bool {
        service.check(self.descriptors()).await.allowed()
    }

    async fn sign_out(&self, service: &Service) {
        service.check(self.descriptors().into_iter().map(Descriptor::refund).collect()).await;
    }
}

#[tokio::test]
async fn a_user_has_one_session_and_an_address_one_user() {
    let services = Services::start("one-login").await;
    for service in &services.each {
        let store = service.store;
        let alice = Login { user: "alice", session: "s1", address: "203.0.113.1" };
        assert!(alice.is_allowed(service).await, "{store}: the first session");
        assert!(alice.is_allowed(service).await, "{store}: another request of the same session");

        let second = Login { user: "alice", session: "s2", address: "203.0.113.2" };
        assert!(!second.is_allowed(service).await, "{store}: a second session of the user");
        let bob = Login { user: "bob", session: "s3", address: "203.0.113.2" };
        assert!(bob.is_allowed(service).await, "{store}: the denied session has not taken the address");

        let neighbour = Login { user: "carol", session: "s4", address: "203.0.113.1" };
        assert!(!neighbour.is_allowed(service).await, "{store}: a second user at the address");
        let carol = Login { address: "203.0.113.3", ..neighbour };
        assert!(carol.is_allowed(service).await, "{store}: the denial has not taken the user's slot");

        let host = Login { user: "dave", session: "s5", address: "2001:db8::1" };
        assert!(host.is_allowed(service).await, "{store}");
        let same_network = Login { user: "erin", session: "s6", address: "2001:db8::2" };
        assert!(!same_network.is_allowed(service).await, "{store}: a /64 network is one address");

        second.sign_out(service).await;
        assert!(!second.is_allowed(service).await, "{store}: a denied session releases nothing");
        alice.sign_out(service).await;
        let later = Login { address: "203.0.113.1", ..second };
        assert!(later.is_allowed(service).await, "{store}: both slots are free after the first session");

        assert!(!service.has_limit(&[("user", "alice")]).await, "{store}: without a session");
    }
}

/// Sends requests from an address in a country, and returns how many are allowed.
async fn visits_from(service: &Service, country: &str, address: &str, requests: usize) -> usize {
    service.count_allowed(requests, &[&[("country", country), ("remote_address", address)]]).await
}

#[tokio::test]
async fn each_country_has_its_limit_per_address() {
    let services = Services::start("country").await;
    for service in &services.each {
        let store = service.store;
        for (country, limit) in [("DE", 30), ("FR", 10), ("AQ", 0), ("unknown", 3)] {
            assert_eq!(visits_from(service, country, "203.0.113.1", limit + 2).await, limit, "{store}: {country}");
        }
        assert_eq!(visits_from(service, "IT", "203.0.113.1", 1).await, 1, "{store}: another country");
        assert_eq!(visits_from(service, "DE", "203.0.113.2", 1).await, 1, "{store}: another address");
        assert_eq!(visits_from(service, "FR", "2001:db8::1", 10).await, 10, "{store}");
        assert_eq!(visits_from(service, "FR", "2001:db8::2", 1).await, 0, "{store}: a /64 network is one address");
        assert!(!service.has_limit(&[("remote_address", "203.0.113.1")]).await, "{store}: without a country");
    }
}

/// Indents a block of a page as part of the HTTP connection manager in `deploy/envoy/envoy.yaml`.
fn as_part_of_envoy(block: &str) -> String {
    let indented: Vec<String> = block.lines().map(|line| format!("          {line}\n")).collect();
    indented.concat()
}

/// The page's filter finds the country of an address, and Envoy does not pass on the header of a caller.
#[test]
fn envoy_finds_the_country_and_removes_that_of_callers() {
    const PAGE: &str = "docs/guides/recipes/country.md";
    let rules = rule_files(PAGE);
    let server = Server::start(rules.path(), "memory");
    let edge = as_part_of_envoy(&code(PAGE, "route_config:\n"));
    let removes_header = ("          route_config:\n", edge.as_str());

    let envoy = start_envoy_of(PAGE, server.grpc, &[removes_header]);
    for request in 1..=5 {
        let (status, _) = envoy.get("/", &[("x-country", "DE")]);
        let expected = if request <= 3 { 200 } else { 429 };
        assert_eq!(status, expected, "request {request} without a known country");
    }

    let database = rules.path().join("country.mmdb");
    fs::write(&database, country_database("FR")).unwrap();
    let filter = as_part_of_envoy(&code(PAGE, "http_filters:\n"));
    let finds_country = ("          http_filters:\n", filter.as_str());
    let path = database.display().to_string();
    let reads_database = ("/var/lib/geoip/GeoLite2-Country.mmdb", path.as_str());
    let envoy = start_envoy_of(PAGE, server.grpc, &[removes_header, finds_country, reads_database]);
    for request in 1..=12 {
        let (status, _) = envoy.get("/", &[("x-country", "DE")]);
        let expected = if request <= 10 { 200 } else { 429 };
        assert_eq!(status, expected, "request {request} from an address in FR");
    }
}

/// Sends requests of a caller, and returns how many are allowed.
async fn calls_of(service: &Service, caller: &str, requests: usize) -> usize {
    service.count_allowed(requests, &[&[("caller", caller)]]).await
}

#[tokio::test]
async fn only_registered_callers_are_allowed() {
    let services = Services::start("registered-only").await;
    for service in &services.each {
        let store = service.store;
        assert_eq!(calls_of(service, "acme", 7).await, 5, "{store}");
        assert_eq!(calls_of(service, "globex", 1).await, 1, "{store}: another registered caller");
        for unregistered in ["stranger", "none", ""] {
            assert_eq!(calls_of(service, unregistered, 2).await, 0, "{store}: {unregistered}");
        }
        assert!(!service.has_limit(&[("other", "acme")]).await, "{store}: without the entry");

        let body =
            br#"{"domain": "registered-only", "descriptors": [{"entries": [{"key": "caller", "value": "new"}]}]}"#;
        let (status, text) = post(&service.operator.server.url("/json"), body);
        assert_eq!(status, 403, "{store}: {text}");
        service.operator.ctl(&["plan", "assign", "registered-only", "caller=new", "registered"]);
        wait_for_async("the caller to be registered", async || {
            service.allows(&[&[("caller", "new")]]).await.then_some(())
        })
        .await;
        assert_eq!(calls_of(service, "new", 6).await, 4, "{store}: one request was allowed before");
    }
}

/// Sends requests to a server in a zone, and returns how many are allowed.
async fn requests_at(service: &Service, server: &str, zone: &str, requests: usize) -> usize {
    service.count_allowed(requests, &[&[("server", server)], &[("zone", zone)]]).await
}

#[tokio::test]
async fn each_server_has_its_limit_below_that_of_the_zone() {
    let services = Services::start("per-server").await;
    for service in &services.each {
        let store = service.store;
        assert_eq!(requests_at(service, "web-1", "eu-1", 7).await, 5, "{store}");
        assert_eq!(requests_at(service, "web-2", "eu-1", 1).await, 1, "{store}: another server");
        assert_eq!(requests_at(service, "large-1", "eu-1", 22).await, 20, "{store}: a larger server");
        assert_eq!(requests_at(service, "large-2", "eu-2", 1).await, 1, "{store}: another larger server");
        // 26 requests of the zone are counted, because denied requests take nothing from it.
        assert_eq!(requests_at(service, "web-3", "eu-1", 6).await, 4, "{store}: the zone has 30");
        assert_eq!(
            requests_at(service, "web-3", "eu-2", 3).await,
            1,
            "{store}: the zone's denials took nothing from the server"
        );
        assert_eq!(service.count_allowed(7, &[&[("server", "web-4")]]).await, 5, "{store}: without a zone");
        assert_eq!(service.count_allowed(1, &[&[("zone", "eu-1")]]).await, 0, "{store}: without a server");
    }
}

/// A plan of `plans-three-windows.yaml`.
struct Plan {
    name: &'static str,
    per_second: u64,
    per_day: u64,
    per_month: u64,
}

const PLANS: [Plan; 3] = [
    Plan { name: "free", per_second: 10, per_day: 1_000, per_month: 20_000 },
    Plan { name: "pro", per_second: 100, per_day: 50_000, per_month: 1_000_000 },
    Plan { name: "enterprise", per_second: 1_000, per_day: 2_000_000, per_month: 50_000_000 },
];

impl Plan {
    /// Returns a descriptor of a user with this plan. Each test of a limit has a user of its own.
    fn descriptor(&self, limit: &str, hits: u64) -> Descriptor {
        descriptor(&[("user", &self.user(limit)), ("plan", self.name)]).hits(hits)
    }

    fn user(&self, limit: &str) -> String {
        format!("{}-{limit}", self.name)
    }

    /// Asserts that a user may send this number of hits in a second, and not one more. Neither request depends on the
    /// time between them.
    async fn assert_per_second(&self, service: &Service) {
        let above = self.descriptor("per_second", self.per_second + 1);
        assert!(!service.check(vec![above]).await.allowed(), "{}: {}", service.store, self.name);
        let all = self.descriptor("per_second", self.per_second);
        assert!(service.check(vec![all]).await.allowed(), "{}: {}", service.store, self.name);
    }

    /// Asserts that a user may send this number of hits in a window, and not one more.
    async fn assert_window(&self, service: &Service, limit: &str, hits: u64) {
        let all = service.check(vec![self.descriptor(limit, hits)]).await;
        assert!(all.allowed(), "{}: {} {limit}: the limit", service.store, self.name);
        let next = service.check(vec![self.descriptor(limit, 1)]).await;
        assert!(!next.allowed(), "{}: {} {limit}: one more", service.store, self.name);
    }

    /// Removes shorter limits of a user, which would deny a request with the hits of a day.
    fn lift(&self, service: &Service, limit: &str, lifted: &str) {
        let user = format!("user={}", self.user(limit));
        service.operator.ctl(&["limit", "set", "plans-three-windows", &user, lifted]);
    }
}

/// Returns the remaining hits of the limit with this name.
fn remaining(answer: &Answer, name: &str) -> Option<u32> {
    let mut statuses: Vec<ExactStatus> = Vec::new();
    for status in answer.exact() {
        statuses.extend(status.others.clone());
        statuses.push(status);
    }
    let found = statuses.into_iter().find(|status| status.name.as_deref() == Some(name));
    found.and_then(|status| status.remaining)
}

#[tokio::test]
async fn each_plan_has_three_windows() {
    let services = Services::start("plans-three-windows").await;
    for service in &services.each {
        let store = service.store;
        for plan in &PLANS {
            plan.assert_per_second(service).await;
            let peek = service.check(vec![plan.descriptor("per_second", 0)]).await;
            let left = (plan.per_day - plan.per_second) as u32;
            assert_eq!(remaining(&peek, "per_day"), Some(left), "{store}: {}: the denied hits took nothing", plan.name);

            plan.lift(service, "per_day", "{limits: {per_second: unlimited}}");
            plan.assert_window(service, "per_day", plan.per_day).await;
            plan.lift(service, "per_month", "{limits: {per_second: unlimited, per_day: unlimited}}");
            plan.assert_window(service, "per_month", plan.per_month).await;
        }
        for (hits, expected) in [(11, false), (10, true)] {
            let without = service.check(vec![descriptor(&[("user", "bob")]).hits(hits)]).await;
            assert_eq!(without.allowed(), expected, "{store}: without a plan, {hits} hits");
            let unknown = service.check(vec![descriptor(&[("user", "carol"), ("plan", "gold")]).hits(hits)]).await;
            assert_eq!(unknown.allowed(), expected, "{store}: an unknown plan, {hits} hits");
        }
        assert!(
            service.check(vec![descriptor(&[("user", "acme")]).hits(1_000)]).await.allowed(),
            "{store}: assigned by the file"
        );
        assert!(!service.has_limit(&[("plan", "free")]).await, "{store}: without a user");
    }
}

/// The pages contain the rules of the files, without the comment at the beginning.
#[test]
fn the_pages_have_the_rules_of_the_files() {
    for name in ["one-login", "country", "registered-only", "per-server", "plans-three-windows"] {
        let file = fs::read_to_string(repository(&format!("deploy/examples/{name}.yaml"))).unwrap();
        let page = rule_files(&format!("docs/guides/recipes/{name}.md"));
        let block = fs::read_to_string(page.path().join(format!("{name}.yaml"))).unwrap();
        let (_, rules_of_file) = file.split_once("\ndomain: ").unwrap();
        let (_, rules_of_page) = block.split_once("\ndomain: ").unwrap();
        assert_eq!(rules_of_page, rules_of_file, "{name}");
    }
}
