{{- /* The pod of one service: (dict "root" $ "name" "verify" "serves" true). `serves` false: a
       further host of a slice. It has the same settings: its place in the group comes from the
       variables that the LeaderWorkerSet's controller adds; it serves no gRPC and is probed by HTTP. */ -}}
{{- define "canopy.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .name -}}
{{- $slice := include "canopy.slice" . | fromJson -}}
metadata:
  labels:
    {{- include "canopy.labels" . | nindent 4 }}
    {{- with $own.pod.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    checksum/config: {{ include "canopy.config" . | sha256sum }}
    {{- if eq $values.model.source "gcsFuse" }}
    gke-gcsfuse/volumes: "true"
    {{- end }}
    {{- with $own.pod.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "canopy.serviceAccount" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $values.preStopSeconds $own.drainSeconds 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $values.podSecurity.runAsUser }}
    runAsGroup: {{ $values.podSecurity.runAsGroup }}
    fsGroup: {{ $values.podSecurity.fsGroup }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $own.pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if or $slice.chipsPerHost $own.pod.nodeSelector }}
  nodeSelector:
    {{- if $slice.chipsPerHost }}
    cloud.google.com/gke-tpu-accelerator: {{ $slice.accelerator }}
    cloud.google.com/gke-tpu-topology: {{ $slice.topology | quote }}
    {{- end }}
    {{- with $own.pod.nodeSelector }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- if or $slice.chipsPerHost $own.pod.tolerations }}
  tolerations:
    {{- if $slice.chipsPerHost }}
    - {key: google.com/tpu, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with $own.pod.tolerations }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- with $own.pod.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $values.topologySpread.enabled (eq (int $slice.hosts) 1) }}
  topologySpreadConstraints:
    {{- $here := . }}
    {{- range $values.topologySpread.keys }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels: {{- include "canopy.selector" $here | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- if eq $values.model.source "fetch" }}
  initContainers:
    - name: fetch-model
      image: {{ include "canopy.image" (dict "root" .root "name" "verify") }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [python, -m, canopy.cli, model, fetch, smollm2-135m-instruct, --with-head, --cache-dir, {{ $values.model.mountPath }}]
      securityContext: {{- include "canopy.containerSecurity" . | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
      resources:
        requests: {cpu: "1", memory: 2Gi}
        limits: {memory: 2Gi}
      volumeMounts:
        - {name: model, mountPath: {{ $values.model.mountPath }}}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ include "canopy.image" . }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [--config, /etc/canopy/config.yaml]
      securityContext: {{- include "canopy.containerSecurity" . | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        {{- range $own.pod.extraEnv }}
        - name: {{ .name }}
          {{- if .secret }}
          valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
          {{- else }}
          value: {{ .value | quote }}
          {{- end }}
        {{- end }}
      ports:
        {{- if .serves }}
        - {name: grpc, containerPort: {{ include "canopy.port" . }}, protocol: TCP}
        {{- end }}
        - {name: metrics, containerPort: {{ $values.metricsPort }}, protocol: TCP}
      {{- if or (not .serves) (include "canopy.speaksTls" .) }}
      startupProbe:
        httpGet: {port: metrics, path: /ready}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $own.startupSeconds 4) 5 }}
      readinessProbe:
        httpGet: {port: metrics, path: /ready}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        httpGet: {port: metrics, path: /alive}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- else }}
      startupProbe:
        grpc: {port: {{ include "canopy.port" . }}, service: {{ include "canopy.grpcName" . }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $own.startupSeconds 4) 5 }}
      readinessProbe:
        grpc: {port: {{ include "canopy.port" . }}, service: {{ include "canopy.grpcName" . }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        grpc: {port: {{ include "canopy.port" . }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- end }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $values.preStopSeconds }}}
      resources: {{- include "canopy.resources" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/canopy, readOnly: true}
        - {name: model, mountPath: {{ $values.model.mountPath }}, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if ne .name "router" }}
        - {name: compile-cache, mountPath: /var/cache/canopy}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- range $kind, $secret := include "canopy.secrets" . | fromJson }}
        - {name: {{ $kind }}, mountPath: /etc/canopy-{{ $kind }}, readOnly: true}
        {{- end }}
        {{- range $own.pod.secretMounts }}
        - {name: {{ .name }}, mountPath: {{ .mountPath }}, readOnly: true}
        {{- end }}
  volumes: {{- include "canopy.volumes" . | nindent 4 }}
{{- end -}}

{{- define "canopy.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with (get .root.Values .name).pod.addCapabilities }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "canopy.resources" -}}
{{- $resources := deepCopy (get .root.Values .name).resources -}}
{{- $slice := include "canopy.slice" . | fromJson -}}
{{- if $slice.chipsPerHost -}}
{{- range $kind := list "limits" "requests" -}}
{{- $amounts := get $resources $kind | default dict -}}
{{- $_ := set $amounts "google.com/tpu" (toString $slice.chipsPerHost) -}}
{{- $_ := set $resources $kind $amounts -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "canopy.volumes" -}}
{{- $values := .root.Values -}}
{{- $cache := $values.compileCache -}}
- name: config
  configMap: {name: {{ include "canopy.serviceName" . }}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- if ne .name "router" }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: 1Gi}
{{- if eq $cache.type "emptyDir" }}
- name: compile-cache
  emptyDir: {}
{{- else if eq $cache.type "claim" }}
- name: compile-cache
  persistentVolumeClaim:
    claimName: {{ required "compileCache.claim.name: empty; name a PersistentVolumeClaim" $cache.claim.name }}
{{- end }}
{{- end }}
- name: model
{{- if eq $values.model.source "claim" }}
  persistentVolumeClaim:
    claimName: {{ required "model.claim.name: empty; name a PersistentVolumeClaim" $values.model.claim.name }}
    readOnly: true
{{- else if eq $values.model.source "gcsFuse" }}
  csi:
    driver: gcsfuse.csi.storage.gke.io
    readOnly: true
    volumeAttributes:
      bucketName: {{ required "model.gcsFuse.bucket: empty; name a bucket" $values.model.gcsFuse.bucket }}
      mountOptions: {{ $values.model.gcsFuse.mountOptions | quote }}
{{- else if eq $values.model.source "image" }}
  image:
    reference: {{ required "model.image.reference: empty; name an OCI image" $values.model.image.reference }}
    pullPolicy: {{ $values.model.image.pullPolicy }}
{{- else }}
  emptyDir: {sizeLimit: 4Gi}
{{- end }}
{{- range $kind, $secret := include "canopy.secrets" . | fromJson }}
- name: {{ $kind }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end }}
{{- range (get $values .name).pod.secretMounts }}
- name: {{ .name }}
  secret: {secretName: {{ .secretName }}, defaultMode: 0440}
{{- end }}
{{- end -}}
